"""Results as tables for people and as JSON."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from lmlib.evaluate.documents import DocumentsEvaluation
from lmlib.evaluate.ratio import Estimate
from lmlib.terminal.table import columns
from runner.evaluation.measuring import Measured, Settings

SuiteScores = tuple[str, dict[str, float]]  # a model's name, and its metrics

_MOST_COLUMNS = 6  # of the table by position
_UNITS = {
    "loss": "nats per token",
    "perplexity": "1",
    "bits_per_byte": "bits per byte",
    "bits_per_character": "bits per character",
}


def tables(found: Sequence[Measured]) -> str:
    """Returns a row for each model and data set; a few results also get the loss by position."""
    which, named, title = _models(found)
    rows = [
        (
            *which, "data", "documents", "tokens", "loss, nats per token", "perplexity",
            "bits per byte", "bits per character",
        )
    ]  # fmt: skip
    for each, name in zip(found, named, strict=True):
        evaluation = each.evaluation
        rows.append(
            (
                *([name] if which else ()),
                each.data,
                f"{evaluation.documents:,}",
                f"{evaluation.targets:,}",
                *(_shown(getattr(evaluation, name)) for name in _UNITS),
            )
        )
    shown = [columns(rows)]
    if len(found) <= _MOST_COLUMNS:
        names = [
            f"{'step ' * (which == ['step'])}{name}, {each.data}" if which else each.data
            for each, name in zip(found, named, strict=True)
        ]
        shown.append(_by_position(found, names))
    if any("±" in table for table in shown):  # absent for a single document
        shown.insert(1, "± is one standard error over documents")
    return "\n\n".join([title, *shown])


def _models(found: Sequence[Measured]) -> tuple[list[str], list[str], str]:
    """Returns the heading and entries of the model column, and the title of the table."""
    models = list(dict.fromkeys(each.model for each in found))
    lengths = sorted({each.sequence_length for each in found})
    of = f"sequences of {' to '.join(f'{length:,}' for length in lengths)} tokens"
    names = [each.model for each in found]
    if len(models) == 1:
        return [], names, f"{models[0]}, {of}"
    runs = {model.rpartition("@")[0] for model in models}
    if len(runs) == 1 and all(each.step is not None for each in found):  # one run over its steps
        return ["step"], [f"{each.step:,}" for each in found], f"{runs.pop()}, {of}"
    return ["model"], names, of[0].upper() + of[1:]


def json_text(found: Sequence[Measured], settings: Settings) -> str:
    """Returns all numbers with units and standard errors; non-finite numbers are strings."""
    content = {
        "overlap": settings.overlap,
        "packed": settings.packed,
        "results": [
            {
                "model": each.model,
                "step": each.step,
                "data": each.data,
                "sequence_length": each.sequence_length,
                **_plain(each.evaluation),
            }
            for each in found
        ],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _plain(evaluation: DocumentsEvaluation) -> dict[str, Any]:
    return {
        "documents": evaluation.documents,
        "targets": evaluation.targets,
        "bytes": evaluation.bytes,
        "characters": evaluation.characters,
        **{name: _number(getattr(evaluation, name), unit) for name, unit in _UNITS.items()},
        "loss_by_position": [
            {
                "first": each.first,
                "last": each.last,
                "targets": each.targets,
                **_number(each.loss, "nats per token"),
            }
            for each in evaluation.by_position
        ],
    }


def _number(estimate: Estimate | None, unit: str) -> Any:
    if estimate is None:
        return None
    numbers = dataclasses.asdict(estimate).items()
    strict = {k: v if v is None or math.isfinite(v) else str(v) for k, v in numbers}
    return {**strict, "unit": unit}


def _shown(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    if estimate.standard_error is None:
        return f"{estimate.value:.4f}"
    return f"{estimate.value:.4f} ± {estimate.standard_error:.4f}"


def _by_position(found: Sequence[Measured], names: Sequence[str]) -> str:
    places = sorted({(at.first, at.last) for each in found for at in each.evaluation.by_position})
    rows = [("position", *names)]
    for place in places:
        cells = []
        for each in found:
            here = [at.loss for at in each.evaluation.by_position if (at.first, at.last) == place]
            cells.append(_shown(here[0]) if here else "")
        rows.append((f"{place[0]:,}–{place[1]:,}", *cells))
    title = "Loss by position, nats per token: tokens of context before the one that predicts"
    return f"{title}\n{columns(rows)}"


def suite_table(found: Sequence[SuiteScores]) -> str:
    """Returns a table with a row for each measurement and a column for each model."""
    names = dict.fromkeys(name for _, metrics in found for name in metrics)
    rows = [("measurement", *(model for model, _ in found))]
    for name in names:
        cells = (f"{metrics[name]:.4f}" if name in metrics else "" for _, metrics in found)
        rows.append((name.removeprefix("suite/"), *cells))
    return columns(rows)


def suite_json(found: Sequence[SuiteScores]) -> str:
    content: list[Any] = [{"model": model, "results": metrics} for model, metrics in found]
    return json.dumps(content, indent=1) + "\n"
