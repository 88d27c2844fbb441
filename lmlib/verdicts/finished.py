"""The final numbers of runs, and whether they may be compared."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmlib.runs import Run
from lmlib.runs.validation import StoredSet, StoredValidation

USUAL_METRIC = "validation_loss"
TRAINING = "training_loss"
BITS_PER_BYTE = "bits_per_byte"
_MEASURED_AGAIN = "measure both on one text with python -m runner.evaluate"


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """What a run came to.

    Args:
      value: of the metric, in `unit`.
      measured: what the metric is called in texts.
      tokens: targets that it has seen.
      tokens_per_second: that went through the model, padding included.
      flops_per_token: analytic; `None` if result.json does not have it.
      validation: `None` of a metric that is none of validation's.
    """

    run: Run
    value: float
    unit: str
    measured: str
    steps: int
    parameters: int
    tokens: int
    tokens_per_second: float
    flops_per_token: float | None
    validation: StoredValidation | None

    @functools.cached_property
    def seconds(self) -> float:
        """The time of all its steps; only this reads metrics.jsonl."""
        return math.fsum(line.get("step_seconds", 0.0) for line in self.run.metrics)

    @property
    def flops(self) -> float | None:
        """Those of all its steps, analytic."""
        if self.flops_per_token is None:
            return None
        return self.flops_per_token * self.tokens_per_second * self.seconds


def finished_run(run: Run, metric: str) -> FinishedRun:
    """What `run` came to.

    Raises:
      ValueError: in words, if it has not finished, its files are damaged, or it has no such metric.
    """
    try:
        result, steps = run.result, run.settings.get("steps")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{run.path} cannot be read: {error}") from error
    if result is None:
        raise ValueError(f"{run.path} has not finished: it has no result.json")
    try:
        measured = _measured(result)
        found = None if metric not in measured else _finished(run, result, metric, measured)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"result.json of {run.path} is damaged ({error!r:.200})") from error
    if found is None:
        raise ValueError(f"{run.path} has no {metric}: it measured {', '.join(measured)}")
    if steps not in (None, str(found.steps)):
        raise ValueError(
            f"{run.path} has not finished: it was continued to {steps} steps, and its result is "
            f"that of {found.steps}"
        )
    if metric == TRAINING:
        return found
    return dataclasses.replace(found, validation=_validation(run, metric, found.steps))


def finished_runs(runs: Iterable[Run], metric: str) -> tuple[list[FinishedRun], list[str]]:
    """What runs came to, and a sentence for each that is left out.

    Raises:
      ValueError: if none is left, or if the metric is another in one of them.
    """
    finished, left_out = [], []
    for run in runs:
        try:
            finished.append(finished_run(run, metric))
        except ValueError as error:
            left_out.append(f"{error}: left out")
    if not finished:
        raise ValueError("; ".join(["no run can be compared", *left_out[:5]]))
    comparable(finished, metric)
    return finished, left_out


def comparable(runs: Sequence[FinishedRun], metric: str) -> None:
    """Raises ValueError, naming two runs and what to do, if the metric is another in one of them:
    of another unit or objective, or measured on other batches."""
    first, *others = runs
    for other in others:
        both = f"{first.run.path} and {other.run.path} cannot be compared"
        if (first.measured, first.unit) != (other.measured, other.unit):
            raise ValueError(
                f"{both} by {metric}: one measures {first.measured} in {first.unit}, the other "
                f"{other.measured} in {other.unit}"
            )
        if first.validation is not None and other.validation is not None:
            _check_text(first.validation, other.validation, metric, both)


def sets_of(validation: StoredValidation, metric: str) -> dict[str, StoredSet]:
    """The sets that `metric` is over: one that it names, or all."""
    _, _, name = metric.partition("/")
    return {name: validation.sets[name]} if name else dict(validation.sets)


def is_bits_per_byte(metric: str) -> bool:
    return metric.partition("/")[0].endswith(BITS_PER_BYTE)


def name_of_sums(validation: StoredValidation, metric: str) -> str:
    """Which sums over batches `metric` is made of."""
    if is_bits_per_byte(metric):
        return validation.cross_entropy or ""
    return metric.removeprefix("validation_").partition("/")[0]


def same_batches(runs: Iterable[FinishedRun], metric: str) -> bool:
    """Whether all runs were validated on the same batches of ids."""
    batches = {
        each.validation
        and tuple(
            (found.digest, found.counts.tobytes())
            for found in sets_of(each.validation, metric).values()
        )
        for each in runs
    }
    return len(batches) == 1 and None not in batches


def _measured(result: Mapping[str, Any]) -> dict[str, tuple[float, str]]:
    """Each metric's value and unit."""
    found = {name: (each["value"], each["unit"]) for name, each in result["validation"].items()}
    return {**found, TRAINING: (result[TRAINING], result["loss_unit"])}


def _finished(
    run: Run,
    result: Mapping[str, Any],
    metric: str,
    measured: Mapping[str, tuple[float, str]],
) -> FinishedRun:
    value, unit = measured[metric]
    flops_per_token = result.get("flops_per_token")
    name = metric.removeprefix("validation_").partition("/")[0]
    return FinishedRun(
        run=run,
        value=float(value),
        unit=str(unit),
        measured=str(result["loss_name"]) if name in (TRAINING, "loss") else name,
        steps=int(result["steps"]),
        parameters=int(result["parameters"]),
        tokens=int(result["tokens"]),
        tokens_per_second=float(result["mean_tokens_per_second"]),
        flops_per_token=None if flops_per_token is None else float(flops_per_token),
        validation=None,
    )


def _validation(run: Run, metric: str, steps: int) -> StoredValidation:
    found = run.validation
    if found is None or found.step != steps:
        raise ValueError(
            f"{run.path} has no validation.json of its last step, so that nothing tells what text "
            "it was measured on: delete its result.json and give its command again, which "
            "evaluates the last checkpoint anew"
        )
    _, _, name = metric.partition("/")
    of_metric = [found.sets.get(name)] if name else [*found.sets.values()]
    if any(each is None or name_of_sums(found, metric) not in each.sums for each in of_metric):
        raise ValueError(f"{run.path}/validation.json is damaged: it lacks {metric}")
    return found


def _check_text(one: StoredValidation, other: StoredValidation, metric: str, both: str) -> None:
    ones, others = sets_of(one, metric), sets_of(other, metric)
    if ones.keys() != others.keys():
        raise ValueError(
            f"{both} by {metric}, the total of other sets: {', '.join(ones)} and "
            f"{', '.join(others)}; name one, as in {metric}/NAME"
        )
    for name, first in ones.items():
        second = others[name]
        if len(ones) > 1 and first.weight != second.weight:
            raise ValueError(f"{both} by {metric}: evaluation.weights differ in {name!r}")
        if first.digest == second.digest:
            continue
        if not is_bits_per_byte(metric):
            raise ValueError(
                f"{both} by {metric}: the batches of {name!r} differ. If the text is the same and "
                f"the tokenizer is not, compare validation_{BITS_PER_BYTE}; else {_MEASURED_AGAIN}"
            )
        if first.text_bytes is None or first.text_bytes != second.text_bytes:
            raise ValueError(
                f"{both} by {metric}: the text of {name!r} has {_bytes(first)} in one and "
                f"{_bytes(second)} in the other; {_MEASURED_AGAIN}"
            )


def _bytes(found: StoredSet) -> str:
    return "an unknown size" if found.text_bytes is None else f"{found.text_bytes:,} bytes"
