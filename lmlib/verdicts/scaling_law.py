"""The loss of a ladder of runs as L = E + A/N^α + B/D^β, of N parameters and D tokens.

Hoffmann et al. 2022 (arXiv:2203.15556, equations 2 to 4). What the runs do not identify is
refused: see `fit_scaling_law`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Num

from lmlib.terminal.quantities import count_text
from lmlib.verdicts.power_law import Fit, PowerLaw

FLOPS = 6.0  # for each parameter and token
LEAST_VALUES = 3  # of a quantity, for its floor, its scale and its exponent
LEAST_RANGE = 2.0  # the largest over the smallest
_LEAST_SPREAD = 0.1  # of the logarithm of tokens, at one number of parameters
_LEAST_SINGULAR = 1e-5  # of the fit's Jacobian, over the largest

_SYMBOLS = {"parameters": ("A", "α"), "tokens": ("B", "β")}
_LETTERS = {"parameters": "N", "tokens": "D"}


@dataclasses.dataclass(frozen=True)
class Number:
    """A fitted number, and its 90 % interval, which may end at 0 and at infinity."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """A fit, of one quantity if the other is the same in all runs: E then holds the other's term.

    Args:
      quantities: "parameters", "tokens" or both, in this order.
      fixed: the value of the one that all runs share, if there is one.
      fit: the law of these quantities, and the losses that it is fitted to.
    """

    quantities: tuple[str, ...]
    fixed: Mapping[str, float]
    fit: Fit

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers of its law: E, then A and B, then α and β."""
        symbols = [_SYMBOLS[quantity] for quantity in self.quantities]
        return ("E", *(scale for scale, _ in symbols), *(exponent for _, exponent in symbols))

    @functools.cached_property
    def numbers(self) -> dict[str, Number]:
        return {
            name: number(self.fit, lambda law: np.log(law.numbers), i)
            for i, name in enumerate(self.names)
        }

    def loss(self, parameters: float, tokens: float) -> float:
        """What the law says of such a run; a quantity without a term does not count."""
        place = {"parameters": parameters, "tokens": tokens}
        x_K = [place[quantity] for quantity in self.quantities]
        return float(self.fit.law.loss(np.array([x_K], float))[0])

    def optimum(self, flops: float) -> dict[str, Number]:
        """The parameters, tokens and loss that are best for a budget of 6·N·D FLOPs.

        Raises:
          ValueError: if the law has not both quantities.
        """
        if len(self.quantities) < 2:
            (only,) = self.quantities
            raise ValueError(
                f"the best share of a budget needs runs of several {_other(only)}: all of these "
                f"have {count_text(self.fixed[_other(only)])}"
            )
        names = ("parameters", "tokens", "loss")
        return {
            name: number(self.fit, lambda law: _best(law, flops), i) for i, name in enumerate(names)
        }

    def __str__(self) -> str:
        """`L = E + A/N^α + B/D^β`, of the terms that it has."""
        terms = [
            f"{_SYMBOLS[each][0]}/{_LETTERS[each]}^{_SYMBOLS[each][1]}" for each in self.quantities
        ]
        return " + ".join(["L = E", *terms])


def fit_scaling_law(
    parameters_R: Num[np.ndarray, "R"],
    tokens_R: Num[np.ndarray, "R"],
    losses_R: Float[np.ndarray, "R"],
) -> ScalingLaw:
    """The law of runs with these parameters, tokens seen and final losses.

    A quantity that is the same in all runs has no term.

    Raises:
      ValueError: saying which numbers are not identified and what runs would: a quantity has fewer
        than three values or they span less than a factor of two; tokens follow from parameters, so
        that α and β cannot be told apart; there are too few runs; or a term is lost in the noise.
    """
    columns = {"parameters": parameters_R.astype(float), "tokens": tokens_R.astype(float)}
    fixed = {name: float(x_R[0]) for name, x_R in columns.items() if len(set(x_R.tolist())) == 1}
    quantities = tuple(name for name in columns if name not in fixed)
    if not quantities:
        raise ValueError(
            "all runs have the same parameters and tokens: a law needs runs of at least three "
            "sizes, of three numbers of tokens, or of both"
        )
    for name in quantities:
        _check_values(name, columns[name])
    x_RK = np.column_stack([columns[name] for name in quantities])
    if len(quantities) == 2:
        _check_told_apart(np.log(x_RK))
    unknown = 1 + 2 * len(quantities)
    places = len(np.unique(x_RK, axis=0))
    if places < unknown or len(losses_R) <= unknown:
        raise ValueError(
            f"{unknown} numbers need at least {unknown + 1} runs, at {unknown} different places, "
            f"and these are {len(losses_R)} at {places}"
        )
    if not (np.isfinite(losses_R).all() and (losses_R > 0).all()):
        raise ValueError(f"a law is of positive losses, and these go from {losses_R.min():.6g}")
    made = ScalingLaw(quantities, fixed, Fit(x_RK, losses_R))
    _check_identified(made, x_RK)
    return made


def _check_values(name: str, x_R: np.ndarray) -> None:
    values = sorted(set(x_R.tolist()))
    span = values[-1] / values[0]
    if len(values) >= LEAST_VALUES and span >= LEAST_RANGE:
        return
    scale, exponent = _SYMBOLS[name]
    listed = ", ".join(count_text(value) for value in values[:4])
    raise ValueError(
        f"E, {scale} and {exponent} are not identified: the runs have {len(values)} numbers of "
        f"{name} ({listed}{', …' * (len(values) > 4)}), which span a factor of {span:.2f}; give "
        f"runs of at least {LEAST_VALUES} that span {LEAST_RANGE:.0f}, or of a single one"
    )


def _check_told_apart(logs_RK: np.ndarray) -> None:
    u_R, v_R = (logs_RK - logs_RK.mean(0)).T
    spread = np.std(v_R - u_R * (u_R @ v_R) / (u_R @ u_R))
    if spread < _LEAST_SPREAD:
        raise ValueError(
            "α and β are not identified: the tokens of these runs follow from their parameters, "
            "so that either could have lowered the loss; add runs of one size with more or with "
            "fewer tokens"
        )


def _check_identified(made: ScalingLaw, x_RK: np.ndarray) -> None:
    """Each number must change the losses in a way of its own."""
    law = made.fit.law
    terms_RK = law.scales_K * x_RK**-law.exponents_K
    by_exponent_RK = terms_RK * law.exponents_K * (np.log(x_RK) - np.log(x_RK).mean(0))
    floors = np.full((len(x_RK), 1), law.floor)
    jacobian = np.hstack([floors, terms_RK, by_exponent_RK]) / law.loss(x_RK)[:, None]
    _, singular, directions = np.linalg.svd(jacobian, full_matrices=False)
    if singular[-1] < _LEAST_SINGULAR * singular[0]:
        name = made.names[int(np.argmax(np.abs(directions[-1])))]
        raise ValueError(
            f"{name} is not identified: the losses would be the same with another one; give runs "
            "of more different sizes or lengths, or more seeds"
        )


def _best(law: PowerLaw, flops: float) -> tuple[float, float, float]:
    """Equation 4 of Hoffmann et al., and the loss there, all as logarithms."""
    (a, b), (alpha, beta) = np.log(law.scales_K), law.exponents_K
    product = math.log(flops / FLOPS)  # N·D
    parameters = (math.log(alpha / beta) + a - b + beta * product) / (alpha + beta)
    tokens = product - parameters
    terms = [math.log(law.floor), a - alpha * parameters, b - beta * tokens]
    return parameters, tokens, float(np.logaddexp.reduce(terms))


def number(fit: Fit, logarithms: Callable[[PowerLaw], Any], index: int = 0) -> Number:
    """One of the positive quantities of a law whose logarithms are given."""
    low, high = fit.interval(lambda law: float(logarithms(law)[index]))
    with np.errstate(over="ignore"):
        return Number(*np.exp([logarithms(fit.law)[index], low, high]).tolist())


def _other(quantity: str) -> str:
    return "tokens" if quantity == "parameters" else "parameters"
