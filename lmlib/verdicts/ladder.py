"""A ladder of runs: losses by size and tokens, and the scaling law fitted to them."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lmlib.runs import Run
from lmlib.terminal.quantities import count_text
from lmlib.terminal.table import columns, wrapped
from lmlib.verdicts.finished import USUAL_METRIC, FinishedRun, finished_runs
from lmlib.verdicts.groups import differing_settings
from lmlib.verdicts.power_law import INTERVAL
from lmlib.verdicts.scaling_law import FLOPS, Number, ScalingLaw, fit_scaling_law

_OF_SIZE = ("model", "steps", "data.batch_size", "data.sequence_length")


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Finished runs ordered by parameters and tokens, and their law.

    Args:
      left_out: a message for each run that is not included.
    """

    metric: str
    runs: Sequence[FinishedRun]
    left_out: Sequence[str]
    law: ScalingLaw

    def text(self, budgets: Sequence[float]) -> str:
        """Returns a table of the runs and the law, its numbers, and the optimum for each budget."""
        return wrapped("\n".join(self._lines(budgets)))

    def _lines(self, budgets: Sequence[float]) -> Iterator[str]:
        law, runs = self.law, self.runs
        titles = ("C, FLOPs",) if law.of_compute else ("N, parameters", "D, tokens")
        rows = [("run", *titles, f"loss, {runs[0].unit}", "fitted")]
        for each in runs:
            place = (count_text(each.parameters), count_text(each.tokens))
            compute = (f"{FLOPS * each.parameters * each.tokens:.3g}",)
            fitted = f"{law.loss(each.parameters, each.tokens):.4f}"
            row = compute if law.of_compute else place
            rows.append((each.run.name, *row, f"{each.value:.4f}", fitted))
        yield columns(rows)
        yield f"\n{law}, fitted to {len(runs)} runs; root mean square error {law.fit.error:.2%}"
        for quantity, value in law.fixed.items():
            yield f"All runs have {count_text(value)} {quantity}; their term is part of E."
        rows = [("", "", "90 % interval")]
        for name, (value, low, high) in law.numbers.items():
            rows.append((name, f"{value:.4g}", f"{low:.4g} to {high:.4g}"))
        yield f"\n{columns(rows)}\n"
        if law.of_compute:
            yield "C = 6·N·D for N parameters, including embeddings, and D targets seen."
        else:
            yield "N: parameters, including embeddings. D: targets seen."
        spent = [x.flops / x.parameters / x.tokens for x in runs if x.flops is not None]
        if len(law.quantities) == 2 and spent:
            yield (
                f"These runs used {min(spent):.3g} to {max(spent):.3g} FLOPs per parameter and "
                f"token; a budget assumes {FLOPS:g}."
            )
        for flops in budgets:
            yield f"\n{'At' if law.of_compute else 'Best for'} {flops:.3g} FLOPs:"
            rows = []
            for name, best in law.optimum(flops).items():
                texts = [f"{x:.4f}" if name == "loss" else count_text(x) for x in best]
                rows.append((f"  {name}", texts[0], f"{texts[1]} to {texts[2]}"))
            yield columns(rows)
        if not law.of_compute and (others := list(differing_settings(runs, _OF_SIZE))):
            yield (
                f"\nWARNING: these runs also differ in {', '.join(others[:6])}, which the law "
                "ignores. Fit runs of one recipe, or the best run of each size."
            )
        if self.left_out:
            yield "\n".join(["", *self.left_out])

    def as_json(self, budgets: Sequence[float]) -> dict[str, Any]:
        """Returns the ladder as JSON values; an unbounded end of an interval is null."""

        def fields(numbers: Mapping[str, Number]) -> dict[str, dict[str, float | None]]:
            return {
                name: {e: v if math.isfinite(v) else None for e, v in each._asdict().items()}
                for name, each in numbers.items()
            }

        return {
            "law": str(self.law),
            "metric": self.metric,
            "unit": self.runs[0].unit,
            "interval": INTERVAL,
            "runs": [
                {"run": str(x.run.path), "parameters": x.parameters, "tokens": x.tokens,
                 "loss": x.value}
                for x in self.runs
            ],
            "left_out": list(self.left_out),
            "numbers": fields(self.law.numbers),
            "error": self.law.fit.error,
            "optima": {f"{flops:g}": fields(self.law.optimum(flops)) for flops in budgets},
        }  # fmt: skip


def ladder_of(runs: Iterable[Run], metric: str = USUAL_METRIC, of_compute: bool = False) -> Ladder:
    """Returns the ladder of `runs`; with `of_compute` its law is of compute only.

    Raises:
      ValueError: if no run has finished, if runs measured different things, or as
        `fit_scaling_law`; the message names the runs that are left out.
    """
    finished, left_out = finished_runs(runs, metric)
    finished.sort(key=lambda each: (each.parameters, each.tokens))
    parameters_R, tokens_R, losses_R = (
        np.array([getattr(x, name) for x in finished]) for name in ("parameters", "tokens", "value")
    )
    try:
        law = fit_scaling_law(parameters_R, tokens_R, losses_R, of_compute)
    except ValueError as error:
        raise ValueError("; ".join([str(error), *left_out])) from error
    return Ladder(metric, finished, left_out, law)
