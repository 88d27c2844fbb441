"""The final numbers of runs, with checks that they are comparable."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lmlib.runs import Run
from lmlib.runs.validation import StoredSet
from lmlib.verdicts.text import BatchDifferences

USUAL_METRIC = "validation_loss"
TRAINING = "training_loss"
BITS_PER_BYTE = "bits_per_byte"
_NEEDED = (  # keys of result.json
    *("steps", "parameters", "tokens", "mean_tokens_per_second"),
    *(TRAINING, "loss_name", "loss_unit", "validation"),
)
_MEASURE_AGAIN = "measure both on one text with python -m runner.evaluate"


class Batches(NamedTuple):
    """The metric's sums over the batches of a validation set; `unit` converts their mean."""

    stored: StoredSet
    sums_N: Float[np.ndarray, "N"]
    unit: float


@dataclasses.dataclass(frozen=True)
class FinishedRun:
    """A run that has finished, and the value of a metric.

    `measured` is the metric's name for display, and `tokens` are the targets seen in training.
    `batches` are by validation set; there are none for a training metric.
    """

    run: Run
    value: float
    unit: str
    measured: str
    steps: int
    parameters: int
    tokens: int
    batches: Mapping[str, Batches]

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

    Raises ValueError if it has not finished, its files are damaged, or it lacks the metric.
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
        run=run,
        value=final.value,
        unit=final.unit,
        measured=result["loss_name"] if name in (TRAINING, "loss") else name,
        batches={} if metric == TRAINING else _batches(run, metric, result["steps"]),
        **{key: result[key] for key in ("steps", "parameters", "tokens")},
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
            left_out.append(str(error))
    if not finished:
        raise ValueError(f"no run can be compared: {'; '.join(left_out[:3])}")
    first, *others = finished
    for other in others:
        both = f"{first.run.path} and {other.run.path} cannot be compared by {metric}"
        if (first.measured, first.unit) != (other.measured, other.unit):
            raise ValueError(
                f"{both}: the first has {first.measured} in {first.unit}, the second "
                f"{other.measured} in {other.unit}"
            )
        _check_text(first, other, metric, both)
    return finished, [f"Left out: {each}" for each in left_out]


def same_batches(runs: Iterable[FinishedRun]) -> bool:
    """True if all runs were validated on the same batches of ids."""
    first, *others = (
        [(x.stored.digest, x.stored.counts.tolist()) for x in each.batches.values()]
        for each in runs
    )
    return bool(first) and all(each == first for each in others)


def batch_differences(pairs: Sequence[tuple[FinishedRun, FinishedRun]]) -> list[BatchDifferences]:
    """Returns the differences of the metric batch by batch, for each validation set.

    Each of the `pairs` is a run and the baseline's run with the same seed, on the same batches.
    """
    sets = pairs[0][0].batches
    weights = {  # counts of units or of bytes, unless the run sets weights
        name: float(x.stored.counts.sum()) / x.unit if x.stored.weight is None else x.stored.weight
        for name, x in sets.items()
    }
    return [
        BatchDifferences(
            np.stack([a.batches[name].sums_N - b.batches[name].sums_N for a, b in pairs]),
            each.stored.counts,
            each.unit * weights[name] / sum(weights.values()),
        )
        for name, each in sets.items()
    ]


def _batches(run: Run, metric: str, steps: int) -> dict[str, Batches]:
    """Returns the batches of the set that `metric` names, or of all sets."""
    found = run.validation
    if found is None or found.step != steps:
        raise ValueError(
            f"{run.path} has no validation.json of its last step, so its validation text is "
            "unknown: delete its result.json and give its command again, which repeats the "
            "evaluation"
        )
    base, _, name = metric.removeprefix("validation_").partition("/")
    per_byte = base.endswith(BITS_PER_BYTE)
    batches = {}
    try:
        for each in [name] if name else found.sets:
            stored = found.sets[each]
            unit = 1 / math.log(2) / (stored.bytes_per_target or math.nan) if per_byte else 1.0
            sums_N = stored.sums[found.cross_entropy or "" if per_byte else base]
            batches[each] = Batches(stored, sums_N, unit)
    except KeyError as error:
        raise ValueError(f"{run.path}/validation.json is damaged: it lacks {metric}") from error
    return batches


def _check_text(one: FinishedRun, other: FinishedRun, metric: str, both: str) -> None:
    if one.batches.keys() != other.batches.keys():
        raise ValueError(
            f"{both}: it covers the sets {', '.join(one.batches)} in the first and "
            f"{', '.join(other.batches)} in the second; name one, as in {metric}/NAME"
        )
    for name, (first, *_) in one.batches.items():
        second = other.batches[name].stored
        if len(one.batches) > 1 and first.weight != second.weight:
            raise ValueError(f"{both}: evaluation.weights differ in {name!r}")
        if first.digest == second.digest:
            continue
        if BITS_PER_BYTE not in metric.partition("/")[0]:
            raise ValueError(
                f"{both}: the batches of {name!r} differ. If only the tokenizer differs, compare "
                f"validation_{BITS_PER_BYTE}; otherwise {_MEASURE_AGAIN}"
            )
        sizes = [x.text_bytes for x in (first, second)]
        if None in sizes or sizes[0] != sizes[1]:
            texts = ("unknown" if size is None else f"{size:,}" for size in sizes)
            raise ValueError(
                f"{both}: the bytes of {name!r} differ ({' and '.join(texts)}); {_MEASURE_AGAIN}"
            )
