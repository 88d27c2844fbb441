"""The points of a sweep as tables: their costs, states and results."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import get_args

from lmlib.plan.cost import Cost, time_of
from lmlib.runs.goodput import NOT_RUNNING, Ended
from lmlib.runs.result import Final
from lmlib.terminal.quantities import count_text, duration_text
from lmlib.terminal.table import columns, wrapped
from runner.sweep.folder import Point

_NOTHING = "-"
_SPEED = "mean_tokens_per_second"


def costs_text(points: Sequence[Point], costs: Sequence[Cost | None]) -> str:
    """Returns a table of tokens, FLOPs and times (at the speed of finished points), with totals."""
    finals = [each.run.final for each in points if each.finished]
    speeds = [each[_SPEED].value for each in finals if _SPEED in each and each[_SPEED].value > 0]
    speed = sum(speeds) / len(speeds) if speeds else None
    rows = [("point", "steps", "tokens", "FLOPs", "time", "")]
    spent, seen, left = 0.0, 0, 0
    for point, cost in zip(points, costs, strict=True):
        cells = (_NOTHING,) * 4
        if cost is not None:
            time = duration_text(cost.tokens / speed) if speed else _NOTHING
            tokens, flops = count_text(cost.tokens), _flops_text(cost.total_flops)
            cells = f"{cost.steps:,}", tokens, flops, time
            spent, seen = spent + cost.total_flops, seen + cost.tokens
            left += 0 if point.finished else cost.tokens
        rows.append((point.name, *cells, status(point)))
    time = f"The time here is measured in the first point. For comparison: {time_of(spent)}."
    if speed:
        rate = f"{count_text(speed)} tokens per second"
        time = f"{duration_text(left / speed)} left, one point after the other, at {rate}."
    whole = f"{len(points)} points, {count_text(seen)} tokens, {_flops_text(spent)} FLOPs"
    return f"{columns(rows)}\n\n{wrapped(f'{whole}. {time}')}"


def results_text(points: Sequence[Point], failures: Mapping[str, str]) -> str:
    """Returns a table of finished points by loss, then one of the others with their states.

    The loss is the validation loss, or else the training loss.
    """
    results = {each.name: each.run.final for each in points if each.finished}
    tables = []
    if results:
        unit = next((loss.unit for each in results.values() for loss in each.values()), "")
        rows = [("point", f"validation_loss, {unit}", f"training_loss, {unit}", "mean tokens/s")]
        rows += [
            (name, *_numbers(results[name]))
            for name in sorted(results, key=lambda name: _order(results[name]))
        ]
        tables.append(columns(rows))
    others = [each for each in points if each.name not in results]
    if others:
        left = [(each.name, status(each, failures), _reason(each, failures)) for each in others]
        tables.append(columns([("not finished", "", ""), *left]))
    return "\n\n".join(tables)


def result_text(point: Point) -> str:
    """Returns the final loss and speed of a finished point in a few words."""
    validation, training, speed = _numbers(point.run.final)
    loss = (
        f"training loss {training}" if validation == _NOTHING else f"validation loss {validation}"
    )
    return f"{loss}, {speed} tokens/s"


def status(point: Point, failures: Mapping[str, str] | None = None) -> str:
    """Returns the state and last step of a point's run.

    A point in `failures` whose run has left no state is "failed".
    """
    run = point.run
    try:
        if point.name in (failures or {}) and run.state.name not in get_args(Ended):
            return "failed"
        return run.status(run.metrics[-1]["step"] if run.metrics else None)
    except (OSError, ValueError):  # damaged: the run will be made again
        return NOT_RUNNING


def _reason(point: Point, failures: Mapping[str, str]) -> str:
    reason = failures.get(point.name, "")
    with contextlib.suppress(OSError, ValueError):
        reason = reason or point.run.state.reason.partition("\n")[0]
    return f"{reason:.160}"


def _flops_text(flops: float) -> str:
    return f"{flops:.1e}".replace("e+", "e")


def _order(final: Mapping[str, Final]) -> tuple[bool, float]:
    """Sorts by validation loss; runs without one come last, by training loss."""
    loss = final.get("validation_loss") or final.get("training_loss")
    value = loss.value if loss and math.isfinite(loss.value) else math.inf
    return "validation_loss" not in final, value


def _numbers(final: Mapping[str, Final]) -> tuple[str, str, str]:
    names = ("validation_loss", "training_loss")
    losses = [f"{final[name].value:.4f}" if name in final else _NOTHING for name in names]
    return losses[0], losses[1], count_text(final[_SPEED].value) if _SPEED in final else _NOTHING
