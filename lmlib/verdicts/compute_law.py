"""The loss of a ladder's runs as L = E + A/C^γ of their compute alone, C = 6·N·D FLOPs.

For rungs of one dial, whose tokens follow from their parameters (Kaplan et al. 2020,
arXiv:2001.08361, §3.3, with the floor of Hoffmann et al. 2022): it predicts the next rung, and says
nothing of other shares of parameters and tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from lmlib.terminal.table import columns
from lmlib.verdicts.ladder import Ladder
from lmlib.verdicts.power_law import Fit
from lmlib.verdicts.scaling_law import FLOPS, Number, number

_UNKNOWN = 3  # E, A and γ
_LEAST_RANGE = 4.0  # the largest compute over the smallest


@dataclasses.dataclass(frozen=True)
class ComputeLaw:
    """A fit, whose `law` is one of FLOPs."""

    fit: Fit

    def loss(self, flops: float) -> Number:
        """At this compute, with the 90 % interval of the law; a run's own noise is not in it."""
        return number(self.fit, lambda law: np.log(law.loss(np.array([[flops]]))))


def fit_compute_law(
    flops_R: Float[np.ndarray, "R"], losses_R: Float[np.ndarray, "R"]
) -> ComputeLaw:
    """Raises ValueError if there are fewer than four runs, of three computes that span a factor of
    four, or a loss is not positive."""
    places = np.unique(flops_R)
    if len(losses_R) <= _UNKNOWN or len(places) < _UNKNOWN or places[-1] < _LEAST_RANGE * places[0]:
        raise ValueError(
            f"E, A and γ need at least {_UNKNOWN + 1} runs, of {_UNKNOWN} computes that span a "
            f"factor of {_LEAST_RANGE:.0f}, and these are {len(losses_R)} of {len(places)} from "
            f"{places[0]:.3g} to {places[-1]:.3g} FLOPs"
        )
    if not (np.isfinite(losses_R).all() and (losses_R > 0).all()):
        raise ValueError(f"a law is of positive losses, and these go from {losses_R.min():.6g}")
    x_R1 = flops_R[:, None]
    return ComputeLaw(Fit(x_R1, losses_R))


def compute_of(ladder: Ladder) -> Float[np.ndarray, "R"]:
    """6·N·D of each run."""
    return np.array([FLOPS * each.parameters * each.tokens for each in ladder.runs], float)


def compute_text(ladder: Ladder, law: ComputeLaw, budgets: Sequence[float]) -> str:
    """The runs beside the law, its numbers, and what it predicts for each budget of FLOPs."""
    return "\n".join(_lines(ladder, law, budgets))


def _lines(ladder: Ladder, law: ComputeLaw, budgets: Sequence[float]) -> Iterator[str]:
    rows = [("run", "C, FLOPs", f"loss, {ladder.unit}", "fitted")]
    fitted_R = law.fit.law.loss(law.fit.x_RK)
    for each, flops, fitted in zip(ladder.runs, compute_of(ladder), fitted_R, strict=True):
        rows.append((each.run.name, f"{flops:.3g}", f"{each.value:.4f}", f"{fitted:.4f}"))
    yield columns(rows)
    yield ""
    floor, scale, exponent = law.fit.law.numbers
    yield (
        f"L = E + A/C^γ with E = {floor:.4g}, A = {scale:.4g}, γ = {exponent:.4g}, fitted to "
        f"{len(ladder.runs)} runs, off by {law.fit.error:.2%} (root mean square)"
    )
    yield "C is 6·N·D, of all parameters and of the targets seen"
    for flops in budgets:
        at = law.loss(flops)
        yield f"at {flops:.3g} FLOPs: {at.value:.4f}, 90 % interval {at.low:.4f} to {at.high:.4f}"
    yield from ladder.left_out
