"""Folders of runs as training leaves them, of numbers that are made up."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lmlib.runs.validation import StoredSet, StoredValidation

UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
BYTES_PER_TARGET = 4.0


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
    folder.mkdir(parents=True)
    lines = {"steps": steps, "seed": 0, "data.seed": 0, **(settings or {})}
    texts = {path: str(value) for path, value in lines.items()}
    (folder / "settings.json").write_text(json.dumps(texts))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "step_seconds": 0.5, "tokens": tokens * step // steps}
            if curve and step in curve:
                line["evaluation_loss"] = curve[step]
            print(json.dumps(line), file=file)
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
    means = {f"/{name}": float(np.mean(each)) for name, each in sets.items()}
    total = float(np.mean(np.concatenate(list(sets.values()))))
    found = {"": total, **(means if len(sets) > 1 else {})}
    validation = {
        **{f"validation_loss{name}": value for name, value in found.items()},
        **{
            f"validation_bits_per_byte{name}": value / np.log(2) / BYTES_PER_TARGET
            for name, value in found.items()
        },
    }
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
