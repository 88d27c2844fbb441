"""Verdicts on runs as data, for tables and pages."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lmlib.runs import Run
from lmlib.verdicts.finished import (
    USUAL_METRIC,
    batch_differences,
    finished_runs,
    same_batches,
)
from lmlib.verdicts.groups import Group, baselines, distinguishing_settings, grouped, lengths
from lmlib.verdicts.seeds import (
    LEAST_SEEDS,
    Difference,
    Outcome,
    paired_difference,
    seeds_needed,
    smallest_effect,
    unpaired_difference,
)
from lmlib.verdicts.speedup import Curve, Speedup, speedup
from lmlib.verdicts.text import TextPrecision, text_precision

USUAL_ERROR_RATE = 0.05
_WARM = 0.1  # the curve of a single run skips this fraction of its tokens


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A group compared with its baseline.

    A negative `difference` is an improvement. `text` is for paired seeds on the same batches, and
    `speedup` is in tokens; `of_compute` has factors that convert it to "steps", "FLOPs" and
    "seconds": the baseline's total cost over the group's.
    """

    baseline: Group
    difference: Difference
    verdict: Outcome
    seeds_needed: int | None
    smallest_effect: float | None
    text: TextPrecision | None
    speedup: Speedup | None
    speedup_problem: str | None
    of_compute: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Row:
    """A group; `judged` is `None` for a baseline, and for a group without a baseline."""

    group: Group
    judged: Verdict | None
    is_baseline: bool


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Groups of runs, the best first.

    `measured` is the metric's name for display, `settings` are the paths that differ,
    and `left_out` has a message for each run that is not included.
    """

    metric: str
    measured: str
    unit: str
    highest_is_best: bool
    margin: float
    error_rate: float
    settings: Sequence[str]
    rows: Sequence[Row]
    left_out: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison as JSON values; a number that is not finite is a string."""
        groups: list[dict[str, Any]] = []
        for row in self.rows:
            group, judged = row.group, row.judged
            fields: dict[str, Any] = {
                "settings": dict(group.settings),
                "runs": {str(run.run.path): run.value for run in group.runs.values()},
                "mean": group.mean,
                "standard_error": group.standard_error,
                "is_baseline": row.is_baseline,
            }
            if judged is not None:
                fields["judged"] = dataclasses.asdict(judged)
                runs = judged.baseline.runs.values()
                fields["judged"]["baseline"] = [str(run.run.path) for run in runs]
                fields["judged"]["difference"]["mean"] *= -1 if self.highest_is_best else 1
            groups.append(fields)
        own = dict(vars(self))
        del own["settings"], own["rows"]
        return _strict({**own, "groups": groups})


def compare(
    runs: Iterable[Run],
    metric: str = USUAL_METRIC,
    baseline: str | None = None,
    margin: float = 0.0,
    error_rate: float = USUAL_ERROR_RATE,
    ignored: Sequence[str] = (),
    highest_is_best: bool = False,
) -> Comparison:
    """Groups runs by their settings except seeds, and compares each group with a baseline.

    Args:
      metric: a name in result.json's `validation`, or "training_loss".
      baseline: as in `lmlib.verdicts.groups.baselines`; `None` for no verdicts.
      margin: the difference, in the metric's unit, beyond which a setting is better or worse;
        choose it before looking at the runs.
      error_rate: the highest rate at which a setting without an effect is called better.
      ignored: as in `lmlib.verdicts.groups.differing_settings`.

    Raises:
      ValueError: if no run has finished, if runs measured different things, or if no group matches
        the baseline.
    """
    finished, left_out = finished_runs(runs, metric)
    groups, twice = grouped(finished, ignored)
    of = {} if baseline is None else baselines(groups, baseline)
    sign = -1.0 if highest_is_best else 1.0
    rows = []
    for number, group in enumerate(groups):
        judged = None
        if of.get(number, number) != number:
            other = groups[of[number]]
            curve = None if highest_is_best else _curve(groups, other, metric)
            judged = _judged(group, other, curve, margin, error_rate, sign)
        rows.append(Row(group, judged, number in of.values()))
    rows.sort(key=lambda row: sign * row.group.mean if row.group.finite else math.inf)
    return Comparison(
        *(metric, finished[0].measured, finished[0].unit, highest_is_best, margin, error_rate),
        settings=distinguishing_settings(groups),
        rows=rows,
        left_out=[*left_out, *twice],
    )


def _judged(
    group: Group,
    baseline: Group,
    curve: Curve | None,
    margin: float,
    error_rate: float,
    sign: float,
) -> Verdict:
    # Pair the seeds that both have, if there are enough; otherwise compare all runs unpaired.
    ours, theirs = group.runs, baseline.runs
    pairs = [(run, theirs[seed]) for seed, run in ours.items() if seed in theirs]
    if len(pairs) >= min(LEAST_SEEDS, len(ours), len(theirs)):
        difference = paired_difference(sign * np.array([a.value - b.value for a, b in pairs]))
    else:
        difference = unpaired_difference(sign * group.values, sign * baseline.values)
    if not math.isfinite(difference.mean):
        curve = None
    problem = None if curve is None else curve.problem
    text = None
    if difference.paired and same_batches(run for pair in pairs for run in pair):
        text = text_precision(batch_differences(pairs))
    costs = {}
    for name in ("steps", "FLOPs", "seconds"):
        ours_R, theirs_R = (
            [getattr(run, name.lower()) for run in each.values()] for each in (ours, theirs)
        )
        if all([*ours_R, *theirs_R]):
            costs[name] = float(np.mean(theirs_R) / np.mean(ours_R))
    return Verdict(
        baseline=baseline,
        difference=difference,
        verdict=difference.verdict(margin, error_rate),
        seeds_needed=seeds_needed(difference, margin, error_rate),
        smallest_effect=smallest_effect(difference, margin, error_rate),
        text=text,
        speedup=speedup(curve, _tokens(baseline), difference) if curve and not problem else None,
        speedup_problem=problem,
        of_compute=costs,
    )


def _curve(groups: Sequence[Group], baseline: Group, metric: str) -> Curve | None:
    """Returns the curve through runs of several lengths if there are enough of them.

    Otherwise the curve goes through the validation losses during training.
    """
    ladder = [group for group in lengths(groups, baseline) if group.finite]
    points = [(_tokens(group), each) for group in ladder for each in group.values]
    whole = Curve(points, whole_schedules=True)
    if whole.problem is None:
        return whole
    # Seeds may differ by a few targets, so a step is converted with the mean number of tokens.
    tokens, measured = _tokens(baseline), metric.replace("validation_", "evaluation_", 1)
    points = [
        (line["step"] / run.steps * tokens, float(line[measured]))
        for run in baseline.runs.values()
        for line in run.run.metrics
        if measured in line and line["step"] > _WARM * run.steps
    ]
    return Curve(points, whole_schedules=False) if points else None


def _tokens(group: Group) -> float:
    return float(np.mean([run.tokens for run in group.runs.values()]))


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
