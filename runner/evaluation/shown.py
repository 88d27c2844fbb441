"""Results as tables for people and as JSON."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from lmlib.evaluate.documents import DocumentsEvaluation
from lmlib.evaluate.ratio import Estimate
from lmlib.table import columns
from runner.evaluation.measuring import Measured, Settings

_MOST_COLUMNS = 6  # of the table by position
_UNITS = {
    "loss": "nats per token",
    "perplexity": "1",
    "bits_per_byte": "bits per byte",
    "bits_per_character": "bits per character",
}


def tables(found: Sequence[Measured]) -> str:
    """One line for each model and data set; and the loss by position, if there are not too many."""
    several = len({each.model for each in found}) > 1
    rows = [
        (
            *(("model",) if several else ()), "data", "documents", "tokens",
            "loss, nats per token", "perplexity", "bits per byte", "bits per character",
        )
    ]  # fmt: skip
    for each in found:
        evaluation = each.evaluation
        rows.append(
            (
                *((each.model,) if several else ()),
                each.data,
                f"{evaluation.documents:,}",
                f"{evaluation.targets:,}",
                *(_shown(getattr(evaluation, name)) for name in _UNITS),
            )
        )
    lines = [columns(rows), "", "± is one standard error over documents"]
    if not several:
        lines.insert(0, f"{found[0].model}, sequences of {found[0].sequence_length:,} tokens\n")
    if len(found) <= _MOST_COLUMNS:
        lines += ["", _by_position(found, several)]
    return "\n".join(lines)


def json_text(found: Sequence[Measured], settings: Settings) -> str:
    """All numbers, each with its unit and standard error; what is not finite is a string."""
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
    numbers = {name: _strict(value) for name, value in dataclasses.asdict(estimate).items()}
    return {**numbers, "unit": unit}


def _strict(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _shown(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    if estimate.standard_error is None:
        return f"{estimate.value:.4f}"
    return f"{estimate.value:.4f} ± {estimate.standard_error:.4f}"


def _by_position(found: Sequence[Measured], several: bool) -> str:
    places = sorted({(at.first, at.last) for each in found for at in each.evaluation.by_position})
    names = [f"{each.model} on {each.data}" if several else each.data for each in found]
    rows = [("position", *names)]
    for place in places:
        cells = []
        for each in found:
            here = [at.loss for at in each.evaluation.by_position if (at.first, at.last) == place]
            cells.append(_shown(here[0]) if here else "")
        rows.append((f"{place[0]:,}–{place[1]:,}", *cells))
    title = "Loss by position, nats per token: tokens of context before the one that predicts"
    return f"{title}\n{columns(rows)}"
