"""A ladder of runs: what each came to, by its size and its tokens, and the law through them."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lmlib.runs import Run
from lmlib.terminal.quantities import count_text
from lmlib.terminal.table import columns
from lmlib.verdicts.finished import USUAL_METRIC, FinishedRun, finished_runs
from lmlib.verdicts.groups import differing_settings
from lmlib.verdicts.scaling_law import FLOPS, ScalingLaw, fit_scaling_law

_OF_SIZE = ("model", "steps", "data.batch_size", "data.sequence_length")


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Finished runs, by parameters and tokens.

    Args:
      unit: of the metric.
      other_settings: in which runs differ besides those of their size and length.
      left_out: a sentence for each run that is not in it.
    """

    metric: str
    unit: str
    runs: tuple[FinishedRun, ...]
    other_settings: tuple[str, ...]
    left_out: tuple[str, ...]

    def losses(self) -> np.ndarray:
        """Of each run."""
        return np.array([each.value for each in self.runs])

    def fit(self) -> ScalingLaw:
        """Raises ValueError as `fit_scaling_law` does, naming what is left out."""
        try:
            return fit_scaling_law(
                np.array([each.parameters for each in self.runs]),
                np.array([each.tokens for each in self.runs]),
                self.losses(),
            )
        except ValueError as error:
            raise ValueError("; ".join([str(error), *self.left_out])) from error


def ladder_of(runs: Iterable[Run], metric: str = USUAL_METRIC) -> Ladder:
    """Raises ValueError if no run has finished, or if runs measured different things."""
    finished, left_out = finished_runs(runs, metric)
    others = differing_settings(finished, _OF_SIZE)
    finished.sort(key=lambda each: (each.parameters, each.tokens))
    return Ladder(metric, finished[0].unit, tuple(finished), tuple(others), tuple(left_out))


def ladder_text(ladder: Ladder, law: ScalingLaw, budgets: Sequence[float]) -> str:
    """The runs beside the law, its numbers, and what is best for each budget of FLOPs."""
    return "\n".join(_lines(ladder, law, budgets))


def _lines(ladder: Ladder, law: ScalingLaw, budgets: Sequence[float]) -> Iterator[str]:
    rows = [("run", "N, parameters", "D, tokens", f"loss, {ladder.unit}", "fitted")]
    for each in ladder.runs:
        place = {"parameters": each.parameters, "tokens": each.tokens}
        rows.append(
            (
                each.run.name,
                count_text(each.parameters),
                count_text(each.tokens),
                f"{each.value:.4f}",
                f"{law.loss(**place):.4f}",
            )
        )
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
    yield "N counts all parameters, those of embeddings too; D the targets seen; both in units of 1"
    if law.quantities == ("parameters", "tokens") and (spent := _flops_of_each(ladder.runs)):
        low, high = min(spent), max(spent)
        yield (
            f"these runs computed {low:.3g} to {high:.3g} FLOPs for each parameter and token; a "
            f"budget counts {FLOPS:g}"
        )
    for flops in budgets:
        best = law.optimum(flops)
        yield ""
        yield f"best for {flops:.3g} FLOPs:"
        yield columns(
            [
                (f"  {name}", show(each.value), f"{show(each.low)} to {show(each.high)}")
                for name, show in (
                    ("parameters", count_text),
                    ("tokens", count_text),
                    ("loss", "{:.4f}".format),
                )
                for each in [best[name]]
            ]
        )
    if ladder.other_settings:
        yield ""
        yield (
            f"WARNING: these runs differ in {', '.join(ladder.other_settings[:6])} too, which the "
            "law knows nothing of: give the runs of one recipe, or the best of each size"
        )
    if ladder.left_out:
        yield ""
        yield from ladder.left_out


def _flops_of_each(runs: Iterable[FinishedRun]) -> list[float]:
    """For each parameter and token, where runs have recorded it."""
    return [each.flops / each.parameters / each.tokens for each in runs if each.flops is not None]
