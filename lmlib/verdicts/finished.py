"""The final numbers of runs, with checks that they are comparable."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from lmlib.runs import Run
from lmlib.runs.validation import StoredSet, StoredValidation
from lmlib.verdicts.text import BatchDifferences

USUAL_METRIC = "validation_loss"
TRAINING = "training_loss"
BITS_PER_BYTE = "bits_per_byte"
_NEEDED = (  # keys of result.json
    *("steps", "parameters", "tokens", "mean_tokens_per_second"),
    *(TRAINING, "loss_name", "loss_unit", "validation"),
)
_MEASURED_AGAIN = "measure both on one text with python -m runner.evaluate"


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that has finished.

    Args:
      value: of the metric, in `unit`.
      measured: the metric's name, for display.
      tokens: targets seen in training.
      tokens_per_second: tokens through the model, padding included.
      flops_per_token: analytic; `None` if result.json lacks it.
      validation: `None` if the metric is not a validation metric.
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
        """The time of all its steps, read from metrics.jsonl on demand."""
        return math.fsum(line.get("step_seconds", 0.0) for line in self.run.metrics)

    @property
    def flops(self) -> float | None:
        """The analytic FLOPs of all its steps."""
        if self.flops_per_token is None:
            return None
        return self.flops_per_token * self.tokens_per_second * self.seconds


def finished_run(run: Run, metric: str) -> FinishedRun:
    """Returns the numbers of `run`.

    Raises:
      ValueError: if it has not finished, its files are damaged, or it lacks the metric.
    """
    try:
        result, steps = run.result, run.settings.get("steps")
    except OSError as error:
        raise ValueError(f"{run.path} cannot be read: {error}") from error
    if result is None:
        raise ValueError(f"{run.path} has not finished: it has no result.json")
    if lacking := [key for key in _NEEDED if key not in result]:
        raise ValueError(f"result.json of {run.path} is damaged: it has no {lacking[0]}")
    if not run.finished:
        raise ValueError(
            f"{run.path} has not finished: it was continued to {steps} steps, and its result is "
            f"that of {result['steps']}"
        )
    if metric not in (measured := [*result["validation"], TRAINING]):
        raise ValueError(f"{run.path} has no {metric}: it measured {', '.join(measured)}")
    name, final = metric.removeprefix("validation_").partition("/")[0], run.final[metric]
    flops = result.get("flops_per_token")
    return FinishedRun(
        run=run,
        value=final.value,
        unit=final.unit,
        measured=result["loss_name"] if name in (TRAINING, "loss") else name,
        steps=result["steps"],
        parameters=result["parameters"],
        tokens=result["tokens"],
        tokens_per_second=float(result["mean_tokens_per_second"]),
        flops_per_token=None if flops is None else float(flops),
        validation=None if metric == TRAINING else _validation(run, metric, result["steps"]),
    )


def finished_runs(runs: Iterable[Run], metric: str) -> tuple[list[FinishedRun], list[str]]:
    """Returns the numbers of runs, and a message for each run that is left out.

    Raises:
      ValueError: if no run is left, or if the metric differs between two runs in unit, objective or
        validation batches. The message names the two runs and a remedy.
    """
    finished, left_out = [], []
    for run in runs:
        try:
            finished.append(finished_run(run, metric))
        except ValueError as error:
            left_out.append(f"{error}: left out")
    if not finished:
        raise ValueError("; ".join(["no run can be compared", *left_out[:5]]))
    first, *others = finished
    for other in others:
        both = f"{first.run.path} and {other.run.path} cannot be compared by {metric}"
        if (first.measured, first.unit) != (other.measured, other.unit):
            raise ValueError(
                f"{both}: one measures {first.measured} in {first.unit}, the other "
                f"{other.measured} in {other.unit}"
            )
        if first.validation is not None and other.validation is not None:
            _check_text(first.validation, other.validation, metric, both)
    return finished, left_out


def same_batches(runs: Iterable[FinishedRun], metric: str) -> bool:
    """True if all runs were validated on the same batches of ids."""
    batches = {
        each.validation
        and tuple(
            (found.digest, found.counts.tobytes())
            for found in _sets_of(each.validation, metric).values()
        )
        for each in runs
    }
    return len(batches) == 1 and None not in batches


def batch_differences(
    pairs: Sequence[tuple[FinishedRun, FinishedRun]], metric: str
) -> list[BatchDifferences]:
    """Returns the differences of `metric` batch by batch, for each validation set that it covers.

    Args:
      pairs: at least one pair of a run and the baseline's run with the same seed, measured on the
        same batches.
    """
    first = pairs[0][0].validation
    assert first is not None
    sets, name = _sets_of(first, metric), _name_of_sums(first, metric)
    units = dict.fromkeys(sets, 1.0)
    if _is_bits_per_byte(metric):
        units = {
            each: 1 / math.log(2) / (of.bytes_per_target or math.nan) for each, of in sets.items()
        }
    weights = {  # counts of units or of bytes, unless the run sets weights
        each: float(of.counts.sum()) / units[each] if of.weight is None else of.weight
        for each, of in sets.items()
    }

    def sums(run: FinishedRun, of_set: str) -> np.ndarray:
        assert run.validation is not None
        return run.validation.sets[of_set].sums[name]

    return [
        BatchDifferences(
            sums_SN=np.stack([sums(one, each) - sums(other, each) for one, other in pairs]),
            counts_N=of.counts,
            factor=units[each] * weights[each] / sum(weights.values()),
        )
        for each, of in sets.items()
    ]


def _sets_of(validation: StoredValidation, metric: str) -> dict[str, StoredSet]:
    """Returns the sets that `metric` covers: the one that it names, or all."""
    _, _, name = metric.partition("/")
    return {name: validation.sets[name]} if name else dict(validation.sets)


def _is_bits_per_byte(metric: str) -> bool:
    return metric.partition("/")[0].endswith(BITS_PER_BYTE)


def _name_of_sums(validation: StoredValidation, metric: str) -> str:
    """Returns the name of the per-batch sums behind `metric`."""
    if _is_bits_per_byte(metric):
        return validation.cross_entropy or ""
    return metric.removeprefix("validation_").partition("/")[0]


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
    if any(each is None or _name_of_sums(found, metric) not in each.sums for each in of_metric):
        raise ValueError(f"{run.path}/validation.json is damaged: it lacks {metric}")
    return found


def _check_text(one: StoredValidation, other: StoredValidation, metric: str, both: str) -> None:
    ones, others = _sets_of(one, metric), _sets_of(other, metric)
    if ones.keys() != others.keys():
        raise ValueError(
            f"{both}, the total of other sets: {', '.join(ones)} and {', '.join(others)}; name "
            f"one, as in {metric}/NAME"
        )
    for name, first in ones.items():
        second = others[name]
        if len(ones) > 1 and first.weight != second.weight:
            raise ValueError(f"{both}: evaluation.weights differ in {name!r}")
        if first.digest == second.digest:
            continue
        if not _is_bits_per_byte(metric):
            raise ValueError(
                f"{both}: the batches of {name!r} differ. If the text is the same and the "
                f"tokenizer is not, compare validation_{BITS_PER_BYTE}; else {_MEASURED_AGAIN}"
            )
        if first.text_bytes is None or first.text_bytes != second.text_bytes:
            raise ValueError(
                f"{both}: the text of {name!r} has {_bytes(first)} in one and {_bytes(second)} in "
                f"the other; {_MEASURED_AGAIN}"
            )


def _bytes(found: StoredSet) -> str:
    return "an unknown size" if found.text_bytes is None else f"{found.text_bytes:,} bytes"
