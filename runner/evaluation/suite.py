"""The suite of our own, of saved models."""

import json
from collections.abc import Sequence
from typing import Any

from lmlib.evaluate.suite.suite import Suite
from lmlib.models.model import check_length
from lmlib.terminal.table import columns
from runner.errors import chosen_sizes, user_errors
from runner.evaluation.measuring import SMALLER, default_length
from runner.inference.loaded import Loaded

Measured = tuple[str, dict[str, float]]  # a model's name, and what came out


def measure_suite(loaded: Loaded, suite: Suite, sequence_length: int | None = None) -> Measured:
    """What `loaded` scores; every process must call it.

    Args:
      sequence_length: tokens of a row; `None`: `Suite.length` of what it was trained on.

    Raises:
      ConfigError: if the model cannot compute sequences so long.
    """
    length = sequence_length or suite.length(default_length(loaded))
    with user_errors(), chosen_sizes(SMALLER):
        check_length(loaded.model, length, loaded.compute)
        evaluator = suite.evaluator(
            loaded.mesh, loaded.compute, loaded.model.vocab, loaded.codec, length
        )
    return loaded.name, evaluator(loaded.model)


def suite_table(found: Sequence[Measured]) -> str:
    """A line for each measurement, a column for each model."""
    names = dict.fromkeys(name for _, metrics in found for name in metrics)
    rows = [("measurement", *(model for model, _ in found))]
    for name in names:
        cells = (f"{metrics[name]:.4f}" if name in metrics else "" for _, metrics in found)
        rows.append((name.removeprefix("suite/"), *cells))
    return columns(rows)


def suite_json(found: Sequence[Measured]) -> str:
    content: list[Any] = [{"model": model, "results": metrics} for model, metrics in found]
    return json.dumps(content, indent=1) + "\n"
