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
_MEASURE_AGAIN = "measure both on one text with python -m runner.evaluate"


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that has finished.

    Args:
      value: of the metric, in `unit`.
      measured: the metric's name, for display.
      tokens: targets seen in training.
      validation: `None` if the metric is not a validation metric.
    """

    run: Run
    value: float
    unit: str
    measured: str
    steps: int
    parameters: int
    tokens: int
    validation: StoredValidation | None

    @functools.cached_property
    def seconds(self) -> float:
        """The time of all its steps, read from metrics.jsonl on demand."""
        return math.fsum(line.get("step_seconds", 0.0) for line in self.run.metrics)

    @property
    def flops(self) -> float | None:
        """The analytic FLOPs of all its steps, padding included; `None` if not recorded."""
        result = self.run.result or {}
        of_token = result.get("flops_per_token")
        return of_token and of_token * result["mean_tokens_per_second"] * self.seconds


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
        raise ValueError(f"{run.path}/result.json is damaged: it has no {lacking[0]}")
    if not run.finished:
        raise ValueError(
            f"{run.path} has not finished: it was extended to {steps} steps, but its result is "
            f"from step {result['steps']}"
        )
    if metric not in (measured := [*result["validation"], TRAINING]):
        raise ValueError(f"{run.path} has no {metric}, only {', '.join(measured)}")
    name, final = metric.removeprefix("validation_").partition("/")[0], run.final[metric]
    return FinishedRun(
        run,
        final.value,
        final.unit,
        result["loss_name"] if name in (TRAINING, "loss") else name,
        *(result[key] for key in ("steps", "parameters", "tokens")),
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
            left_out.append(f"Left out: {error}")
    if not finished:
        raise ValueError("; ".join(["no run can be compared", *left_out[:5]]))
    first, *others = finished
    for other in others:
        both = f"{first.run.path} and {other.run.path} cannot be compared by {metric}"
        if (first.measured, first.unit) != (other.measured, other.unit):
            raise ValueError(
                f"{both}: the first has {first.measured} in {first.unit}, the second "
                f"{other.measured} in {other.unit}"
            )
        if first.validation is not None and other.validation is not None:
            _check_text(first.validation, other.validation, metric, both)
    return finished, left_out


def same_batches(runs: Iterable[FinishedRun], metric: str) -> bool:
    """True if all runs were validated on the same batches of ids."""
    batches = {
        each.validation
        and tuple((x.digest, x.counts.tobytes()) for x in _sets(each.validation, metric).values())
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
    sets, name = _sets(first, metric), _name_of_sums(first, metric)
    units = dict.fromkeys(sets, 1.0)
    if _is_bits_per_byte(metric):
        for each, of in sets.items():
            units[each] = 1 / math.log(2) / (of.bytes_per_target or math.nan)
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


def _sets(validation: StoredValidation, metric: str) -> dict[str, StoredSet]:
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
            f"{run.path} has no validation.json of its last step, so its validation text is "
            "unknown: delete its result.json and give its command again, which repeats the "
            "evaluation"
        )
    try:
        lacks = any(
            _name_of_sums(found, metric) not in x.sums for x in _sets(found, metric).values()
        )
    except KeyError:
        lacks = True
    if lacks:
        raise ValueError(f"{run.path}/validation.json is damaged: it lacks {metric}")
    return found


def _check_text(one: StoredValidation, other: StoredValidation, metric: str, both: str) -> None:
    ones, others = _sets(one, metric), _sets(other, metric)
    if ones.keys() != others.keys():
        raise ValueError(
            f"{both}: it covers the sets {', '.join(ones)} in one and {', '.join(others)} in the "
            f"other; name one, as in {metric}/NAME"
        )
    for name, first in ones.items():
        second = others[name]
        if len(ones) > 1 and first.weight != second.weight:
            raise ValueError(f"{both}: evaluation.weights differ in {name!r}")
        if first.digest == second.digest:
            continue
        if not _is_bits_per_byte(metric):
            raise ValueError(
                f"{both}: the batches of {name!r} differ. If only the tokenizer differs, compare "
                f"validation_{BITS_PER_BYTE}; otherwise {_MEASURE_AGAIN}"
            )
        if first.text_bytes is None or first.text_bytes != second.text_bytes:
            sizes = (
                "unknown" if x.text_bytes is None else f"{x.text_bytes:,}" for x in (first, second)
            )
            raise ValueError(
                f"{both}: the bytes of {name!r} differ ({' and '.join(sizes)}); {_MEASURE_AGAIN}"
            )
