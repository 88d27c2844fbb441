"""Folders of runs as training leaves them, of numbers that are made up."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.runs.validation import StoredSet, StoredValidation

UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
BYTES_PER_TARGET = 4.0


def leave_files(
    folder: Path,
    settings: Mapping[str, object],
    lines: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None = None,
    samples: Mapping[int, str] | None = None,
    goodput: Mapping[str, float] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """`lines` of metrics.jsonl, each with its step; `goodput`: the seconds of one start, whose
    start.json is `about` it."""
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
    if about is not None:
        (folder / "starts/00000").mkdir(parents=True)
        (folder / "starts/00000/start.json").write_text(json.dumps(about))
    if goodput is not None:
        start = {"began": 0.0, "until": sum(goodput.values()), "last_step": 1, "seconds": goodput}
        (folder / "goodput.json").write_text(json.dumps({"starts": [start]}))
    return folder


def losses(*values: float | str) -> list[dict[str, Any]]:
    """Lines of the steps 1, 2, … with these losses."""
    return [{"step": step, "loss": value} for step, value in enumerate(values, 1)]


def leave_run(
    folder: Path,
    losses: Mapping[str, np.ndarray] | np.ndarray | float,
    settings: Mapping[str, object] | None = None,
    steps: int = 100,
    tokens: int = 1_000_000,
    parameters: int = 10_000_000,
    digest: str = "1f",
    curve: Mapping[int, float] | None = None,
    finished: bool = True,
) -> None:
    """A run's folder. `losses`: of each validation batch of 100 tokens, by set if several;
    `curve`: `evaluation_loss` by step."""
    texts = {"steps": steps, "seed": 0, "data.seed": 0, **(settings or {})}
    lines = [
        {"step": step, "step_seconds": 0.5, "tokens": tokens * step // steps}
        | ({"evaluation_loss": curve[step]} if curve and step in curve else {})
        for step in range(1, steps + 1)
    ]
    leave_files(folder, texts, lines)
    if not finished:
        return
    sets = losses if isinstance(losses, Mapping) else {"validation": np.atleast_1d(losses)}
    stored = {
        name: StoredSet(
            digest, BYTES_PER_TARGET, None, np.full(len(each), 100), {"loss": 100.0 * each}
        )
        for name, each in sets.items()
    }
    StoredValidation(steps, "loss", stored).save(folder)
    total = float(np.mean(np.concatenate(list(sets.values()))))
    found = {"": total}
    if len(sets) > 1:
        found |= {f"/{name}": float(np.mean(each)) for name, each in sets.items()}
    validation = {f"validation_loss{name}": value for name, value in found.items()}
    for name, value in found.items():
        validation[f"validation_bits_per_byte{name}"] = value / np.log(2) / BYTES_PER_TARGET
    result = {
        "steps": steps,
        "parameters": parameters,
        "tokens": tokens,
        "mean_tokens_per_second": tokens / (0.5 * steps),
        "training_loss": total,
        "loss_name": "loss",
        "loss_unit": UNITS["loss"],
        "flops_per_token": 6.0 * parameters,
        "validation": {
            name: {"value": value, "unit": UNITS[name[11:].partition("/")[0]]}
            for name, value in validation.items()
        },
    }
    (folder / "result.json").write_text(json.dumps(result))
