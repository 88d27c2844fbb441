"""A ladder of runs: losses by size and tokens, and the scaling law fitted to them."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lmlib.runs import Run
from lmlib.terminal.quantities import count_text
from lmlib.terminal.table import columns
from lmlib.verdicts.finished import USUAL_METRIC, FinishedRun, finished_runs
from lmlib.verdicts.groups import differing_settings
from lmlib.verdicts.power_law import INTERVAL
from lmlib.verdicts.scaling_law import FLOPS, Number, ScalingLaw, fit_scaling_law

_OF_SIZE = ("model", "steps", "data.batch_size", "data.sequence_length")


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Finished runs with their parameters and tokens.

    Args:
      unit: of the metric.
      other_settings: settings that differ between runs, apart from size and length.
      left_out: a message for each run that is not included.
    """

    metric: str
    unit: str
    runs: tuple[FinishedRun, ...]
    other_settings: tuple[str, ...]
    left_out: tuple[str, ...]

    def fit(self, of_compute: bool = False) -> ScalingLaw:
        """Fits a scaling law.

        Raises ValueError as `fit_scaling_law`; the message names the runs that are left out.
        """
        parameters_R = np.array([each.parameters for each in self.runs])
        tokens_R = np.array([each.tokens for each in self.runs])
        losses_R = np.array([each.value for each in self.runs])
        try:
            return fit_scaling_law(parameters_R, tokens_R, losses_R, of_compute)
        except ValueError as error:
            raise ValueError("; ".join([str(error), *self.left_out])) from error


def ladder_of(runs: Iterable[Run], metric: str = USUAL_METRIC) -> Ladder:
    """Returns the ladder of `runs`.

    Raises ValueError if no run has finished, or if runs measured different things.
    """
    finished, left_out = finished_runs(runs, metric)
    others = differing_settings(finished, _OF_SIZE)
    finished.sort(key=lambda each: (each.parameters, each.tokens))
    return Ladder(metric, finished[0].unit, tuple(finished), tuple(others), tuple(left_out))


def ladder_text(ladder: Ladder, law: ScalingLaw, budgets: Sequence[float]) -> str:
    """Returns a table of the runs and the law, its numbers, and the optimum for each budget."""
    return "\n".join(_lines(ladder, law, budgets))


def as_json(ladder: Ladder, law: ScalingLaw, budgets: Sequence[float]) -> dict[str, Any]:
    """Returns the ladder and its law as JSON values; an unbounded end of an interval is null."""

    def fields(numbers: Mapping[str, Number]) -> dict[str, dict[str, float | None]]:
        return {
            name: {
                end: each if math.isfinite(each) else None
                for end, each in dataclasses.asdict(number).items()
            }
            for name, number in numbers.items()
        }

    runs = [
        {
            "run": str(each.run.path),
            "parameters": each.parameters,
            "tokens": each.tokens,
            "loss": each.value,
        }
        for each in ladder.runs
    ]
    return {
        "law": str(law),
        "metric": ladder.metric,
        "unit": ladder.unit,
        "interval": INTERVAL,
        "runs": runs,
        "left_out": list(ladder.left_out),
        "numbers": fields(law.numbers),
        "error": law.fit.error,
        "optima": {f"{flops:g}": fields(law.optimum(flops)) for flops in budgets},
    }


def _lines(ladder: Ladder, law: ScalingLaw, budgets: Sequence[float]) -> Iterator[str]:
    titles = ("C, FLOPs",) if law.of_compute else ("N, parameters", "D, tokens")
    rows = [("run", *titles, f"loss, {ladder.unit}", "fitted")]
    for each in ladder.runs:
        place = count_text(each.parameters), count_text(each.tokens)
        compute = f"{FLOPS * each.parameters * each.tokens:.3g}"
        fitted = law.loss(each.parameters, each.tokens)
        of_run = (compute,) if law.of_compute else place
        rows.append((each.run.name, *of_run, f"{each.value:.4f}", f"{fitted:.4f}"))
    yield columns(rows)
    yield ""
    yield f"{law}, fitted to {len(ladder.runs)} runs, off by {law.fit.error:.2%} (root mean square)"
    for quantity, value in law.fixed.items():
        yield f"all runs have {count_text(value)} {quantity}, whose share is part of E"
    yield ""
    numbers = [("", "", "90 % interval")]
    numbers += [
        (name, f"{each.value:.4g}", f"{each.low:.4g} to {each.high:.4g}")
        for name, each in law.numbers.items()
    ]
    yield columns(numbers)
    yield ""
    if law.of_compute:
        yield "C is 6·N·D, of all parameters and of the targets seen"
    else:
        yield (
            "N counts all parameters, those of embeddings too; D the targets seen; both in units "
            "of 1"
        )
    if len(law.quantities) == 2 and (spent := _flops_of_each(ladder.runs)):
        yield (
            f"these runs computed {min(spent):.3g} to {max(spent):.3g} FLOPs for each parameter "
            f"and token; a budget counts {FLOPS:g}"
        )
    for flops in budgets:
        shown = {"loss": "{:.4f}".format}
        yield ""
        yield f"{'at' if law.of_compute else 'best for'} {flops:.3g} FLOPs:"
        yield columns(
            [
                (f"  {name}", show(each.value), f"{show(each.low)} to {show(each.high)}")
                for name, each in law.optimum(flops).items()
                for show in [shown.get(name, count_text)]
            ]
        )
    if ladder.other_settings and not law.of_compute:
        yield ""
        yield (
            f"WARNING: these runs differ in {', '.join(ladder.other_settings[:6])} too, which the "
            "law knows nothing of: give the runs of one recipe, or the best of each size"
        )
    if ladder.left_out:
        yield ""
        yield from ladder.left_out


def _flops_of_each(runs: Iterable[FinishedRun]) -> list[float]:
    """Returns FLOPs per parameter and token, for the runs that have recorded them."""
    return [each.flops / each.parameters / each.tokens for each in runs if each.flops is not None]
