"""Scaling law L = E + A/N^α + B/D^β of N parameters and D tokens, fitted to a ladder of runs.

Hoffmann et al. 2022 (arXiv:2203.15556, equations 2 to 4).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Num

from lmlib.terminal.quantities import count_text
from lmlib.verdicts.power_law import Fit, PowerLaw

FLOPS = 6.0  # per parameter and token
LEAST_VALUES = 3  # distinct values of a quantity, for floor, scale and exponent
_LEAST_SPREAD = 0.1  # of log tokens, at a fixed number of parameters
_LEAST_SINGULAR = 1e-5  # smallest singular value of the fit's Jacobian over the largest
_QUANTITIES = {  # letter, scale, exponent, and the required ratio of largest to smallest
    "parameters": ("N", "A", "α", 2.0),
    "tokens": ("D", "B", "β", 2.0),
    "compute": ("C", "A", "γ", 4.0),
}


class Number(NamedTuple):
    """A fitted number and its 90 % interval, whose ends may be 0 and infinity."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """A fitted law of "parameters", "tokens" or both, in this order; or of "compute".

    A quantity that all runs share is in `fixed`. It has no term; E includes it.
    """

    quantities: tuple[str, ...]
    fixed: Mapping[str, float]
    fit: Fit

    @property
    def of_compute(self) -> bool:
        return self.quantities == ("compute",)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its numbers: E, then A and B, then α and β."""
        _, scales, exponents, _ = zip(*(_QUANTITIES[x] for x in self.quantities), strict=True)
        return ("E", *scales, *exponents)

    @functools.cached_property
    def numbers(self) -> dict[str, Number]:
        return self._numbers(self.names, lambda law: np.log(law.numbers))

    def loss(self, parameters: float, tokens: float) -> float:
        """Returns the predicted loss of a run; a quantity without a term is ignored."""
        place = {"parameters": parameters, "tokens": tokens, "compute": FLOPS * parameters * tokens}
        x_1K = np.array([[place[quantity] for quantity in self.quantities]], float)
        return float(self.fit.law.loss(x_1K)[0])

    def optimum(self, flops: float) -> dict[str, Number]:
        """Returns the best parameters, tokens and loss for a budget of 6·N·D FLOPs.

        A law of compute gives only the loss. Raises ValueError if parameters or tokens are fixed.
        """
        if self.of_compute:
            return self._numbers(["loss"], lambda law: np.log(law.loss(np.array([[flops]]))))
        if len(self.quantities) < 2:
            ((missing, value),) = self.fixed.items()
            raise ValueError(
                f"the best split of a budget needs runs with several numbers of {missing}: all of "
                f"these have {count_text(value)}"
            )
        return self._numbers(("parameters", "tokens", "loss"), lambda law: _best(law, flops))

    def _numbers(
        self, names: Iterable[str], logarithms: Callable[[PowerLaw], Any]
    ) -> dict[str, Number]:
        """Returns the positive quantities of the law whose `logarithms` are given."""
        found = {}
        for i, name in enumerate(names):
            ends = self.fit.interval(lambda law, i=i: float(logarithms(law)[i]))  # type: ignore[misc]
            with np.errstate(over="ignore"):
                found[name] = Number(*np.exp([logarithms(self.fit.law)[i], *ends]).tolist())
        return found

    def __str__(self) -> str:
        """The formula with the terms that it has, such as `L = E + A/N^α + B/D^β`."""
        known = [_QUANTITIES[quantity] for quantity in self.quantities]
        return " + ".join(["L = E", *(f"{scale}/{x}^{power}" for x, scale, power, _ in known)])


def fit_scaling_law(
    parameters_R: Num[np.ndarray, "R"],
    tokens_R: Num[np.ndarray, "R"],
    losses_R: Float[np.ndarray, "R"],
    of_compute: bool = False,
) -> ScalingLaw:
    """Fits the law to runs with these parameters, tokens seen and final losses.

    With `of_compute` the law is L = E + A/C^γ of the compute C = 6·N·D FLOPs (Kaplan et al. 2020,
    arXiv:2001.08361, §3.3, with the floor of Hoffmann et al.). It predicts the next rung, but not
    other ratios of tokens to parameters.

    Raises:
      ValueError: if the runs don't identify a number: it names the number and runs that would help.
    """
    columns = {"parameters": parameters_R.astype(float), "tokens": tokens_R.astype(float)}
    if of_compute:
        columns = {"compute": FLOPS * columns["parameters"] * columns["tokens"]}
    fixed = {name: float(x_R[0]) for name, x_R in columns.items() if len(set(x_R.tolist())) == 1}
    quantities = tuple(name for name in columns if name not in fixed)
    if not quantities:
        raise ValueError(
            f"all runs have the same {' and '.join(columns)}: a law needs runs of at least three "
            "sizes, or with three numbers of tokens"
        )
    for name in quantities:
        values, (_, scale, exponent, least_range) = np.unique(columns[name]), _QUANTITIES[name]
        if len(values) < LEAST_VALUES or values[-1] / values[0] < least_range:
            listed = ", ".join(map(count_text, values[:4])) + ", …" * (len(values) > 4)
            raise ValueError(
                f"E, {scale} and {exponent} are not identified: the runs have {len(values)} "
                f"numbers of {name} ({listed}), which span a factor of "
                f"{values[-1] / values[0]:.2f}. Give at least {LEAST_VALUES} that span "
                f"{least_range:.0f}{', or one' * (not of_compute)}."
            )
    x_RK = np.column_stack([columns[name] for name in quantities])
    if len(quantities) == 2:
        u_R, v_R = (np.log(x_RK) - np.log(x_RK).mean(0)).T
        if np.std(v_R - u_R * (u_R @ v_R) / (u_R @ u_R)) < _LEAST_SPREAD:
            raise ValueError(
                "α and β are not identified: the tokens of these runs follow from their "
                "parameters, so either could have lowered the loss. Add runs of one size with "
                "more or fewer tokens."
            )
    unknown, places = 1 + 2 * len(quantities), len(np.unique(x_RK, axis=0))
    if places < unknown or len(losses_R) <= unknown:
        raise ValueError(
            f"{unknown} parameters need at least {unknown + 1} runs at {unknown} different places, "
            f"but there are {len(losses_R)} at {places}"
        )
    if not (np.isfinite(losses_R).all() and (losses_R > 0).all()):
        raise ValueError(f"a law needs positive losses, but the smallest is {losses_R.min():.6g}")
    made = ScalingLaw(quantities, fixed, Fit(x_RK, losses_R))
    if not of_compute:
        # Each number must change the losses in its own way.
        _, singular, directions = np.linalg.svd(made.fit.slopes, full_matrices=False)
        if singular[-1] < _LEAST_SINGULAR * singular[0]:
            raise ValueError(
                f"{made.names[int(np.argmax(np.abs(directions[-1])))]} is not identified: other "
                "values give the same losses. Add runs of more sizes or lengths, or more seeds."
            )
    return made


def _best(law: PowerLaw, flops: float) -> tuple[float, float, float]:
    """Returns the optimum of equation 4 of Hoffmann et al. and its loss, as logarithms."""
    (a, b), (alpha, beta) = np.log(law.scales_K), law.exponents_K
    product = math.log(flops / FLOPS)  # N·D
    parameters = (math.log(alpha / beta) + a - b + beta * product) / (alpha + beta)
    tokens = product - parameters
    terms = [math.log(law.floor), a - alpha * parameters, b - beta * tokens]
    return parameters, tokens, float(np.logaddexp.reduce(terms))
