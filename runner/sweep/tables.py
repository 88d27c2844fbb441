"""The points of a sweep as tables: what they will cost, and what came of them."""

import math
from collections.abc import Callable, Mapping, Sequence

from lmlib.plan.cost import Cost, time_of
from lmlib.runs.result import Final
from lmlib.terminal.quantities import count_text, duration_text
from lmlib.terminal.table import columns
from runner.monitoring.run_log import FILE_NAME as RUN_LOG
from runner.sweep.folder import Point
from runner.sweep.last_line import last_line

_LONGEST = 160  # characters of a line of a failed run
_NOTHING = "-"


def costs_text(points: Sequence[Point], costs: Sequence[Cost | None]) -> str:
    """A row for each point: tokens, FLOPs, and the time at the speed of those that have finished;
    then the whole."""
    speed = _speed(points)
    rows = [("point", "steps", "tokens", "FLOPs", "time", "")]
    tokens, flops, seconds = 0, 0.0, 0.0
    for point, cost in zip(points, costs, strict=True):
        if cost is None:
            rows.append((point.name, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _state(point)))
            continue
        of_point = cost.tokens
        tokens += of_point
        flops += cost.total_flops
        left = 0.0 if point.finished or not speed else of_point / speed
        seconds += left
        rows.append(
            (
                point.name,
                f"{cost.steps:,}",
                count_text(of_point),
                _flops_text(cost.total_flops),
                duration_text(of_point / speed) if speed else _NOTHING,
                _state(point),
            )
        )
    whole = f"{len(points)} points, {count_text(tokens)} tokens, {_flops_text(flops)} FLOPs"
    if speed:
        whole += (
            f"; {duration_text(seconds)} for what has not finished, one after the other, at the "
            f"{count_text(speed)} tokens per second of those that have"
        )
    else:
        whole += f"; {time_of(flops)}, and measured once one has finished"
    return f"{columns(rows)}\n\n{whole}"


def results_text(points: Sequence[Point], failures: Mapping[str, str]) -> str:
    """A row for each point that has finished, by validation loss, else training loss; then those
    that have not, with the last line of what they wrote."""
    results = {each.name: each.run.final for each in points if each.finished}
    finished = sorted(results, key=lambda name: _order(results[name]))
    tables = []
    if finished:
        unit = next((loss.unit for each in results.values() for loss in each.values()), "")
        rows = [("point", f"validation_loss, {unit}", f"training_loss, {unit}", "mean tokens/s")]
        rows += [(name, *_numbers(results[name])) for name in finished]
        tables.append(columns(rows))
    others = [each for each in points if each.name not in results]
    if others:
        left = [(each.name, _state(each, failures), _last(each, failures)) for each in others]
        tables.append(columns([("not finished", "", ""), *left]))
    return "\n\n".join(tables)


def result_text(point: Point) -> str:
    """What came of a point that has finished, in a few words."""
    validation, training, speed = _numbers(point.run.final)
    return f"validation loss {validation}, training loss {training}, {speed} tokens/s"


def _speed(points: Sequence[Point]) -> float | None:
    """Tokens per second, on average over the points that have finished."""
    name = "mean_tokens_per_second"
    finals = [each.run.final for each in points if each.finished]
    speeds = [each[name].value for each in finals if name in each and each[name].value > 0]
    return sum(speeds) / len(speeds) if speeds else None


def _flops_text(flops: float) -> str:
    return f"{flops:.1e}".replace("e+", "e")


def _state(point: Point, failures: Mapping[str, str] | None = None) -> str:
    if point.finished:
        return "finished"
    if failures and point.name in failures:
        return "failed"
    last = point.run.metrics[-1:]
    return f"at step {last[0]['step']:,}" if last else ""


def _last(point: Point, failures: Mapping[str, str]) -> str:
    line = failures.get(point.name) or last_line(point.workdir / RUN_LOG)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def _order(final: Mapping[str, Final]) -> tuple[bool, float]:
    """By validation loss; without one, after those that have it, by training loss."""
    loss = final.get("validation_loss") or final.get("training_loss")
    value = loss.value if loss and math.isfinite(loss.value) else math.inf
    return "validation_loss" not in final, value


def _numbers(final: Mapping[str, Final]) -> tuple[str, str, str]:
    def text(name: str, of: Callable[[float], str]) -> str:
        return of(final[name].value) if name in final else _NOTHING

    return (
        text("validation_loss", "{:.4f}".format),
        text("training_loss", "{:.4f}".format),
        text("mean_tokens_per_second", count_text),
    )
