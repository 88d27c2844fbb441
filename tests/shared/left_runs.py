"""Workdirs as runs leave them, written by hand: for what reads runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def leave_run(
    folder: Path,
    settings: Mapping[str, object],
    lines: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None = None,
    samples: Mapping[int, str] | None = None,
    goodput: Mapping[str, float] | None = None,
) -> Path:
    """`lines` of metrics.jsonl, each with its step; `goodput`: the seconds of one start."""
    folder.mkdir(parents=True)
    texts = {path: str(value) for path, value in settings.items()}
    (folder / "settings.json").write_text(json.dumps(texts))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    if samples:
        (folder / "samples").mkdir()
        for step, text in samples.items():
            (folder / f"samples/{step:08}.txt").write_text(text, "utf-8", "surrogatepass")
    if goodput is not None:
        start = {"began": 0.0, "until": sum(goodput.values()), "last_step": 1, "seconds": goodput}
        (folder / "goodput.json").write_text(json.dumps({"starts": [start]}))
    return folder


def losses(*values: float | str) -> list[dict[str, Any]]:
    """Lines of the steps 1, 2, … with these losses."""
    return [{"step": step, "loss": value} for step, value in enumerate(values, 1)]
