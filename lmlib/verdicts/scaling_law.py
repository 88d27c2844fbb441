"""The loss of a ladder of runs as L = E + A/N^α + B/D^β, of N parameters and D tokens.

Hoffmann et al. 2022 (arXiv:2203.15556, equations 2 to 4). Numbers that the runs do not identify are
refused: see `fit_scaling_law`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Num

from lmlib.terminal.quantities import count_text
from lmlib.verdicts.power_law import Fit, PowerLaw

FLOPS = 6.0  # for each parameter and token
LEAST_VALUES = 3  # of a quantity, for its floor, its scale and its exponent
_LEAST_SPREAD = 0.1  # of the logarithm of tokens, at one number of parameters
_LEAST_SINGULAR = 1e-5  # of the fit's Jacobian, over the largest


class _Quantity(NamedTuple):
    letter: str
    scale: str
    exponent: str
    least_range: float  # the largest over the smallest


_QUANTITIES = {
    "parameters": _Quantity("N", "A", "α", 2.0),
    "tokens": _Quantity("D", "B", "β", 2.0),
    "compute": _Quantity("C", "A", "γ", 4.0),
}


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
      quantities: "parameters", "tokens" or both, in this order; or "compute".
      fixed: the value of the one that all runs share, if there is one.
      fit: the law of these quantities, and the losses that it is fitted to.
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
        known = [_QUANTITIES[quantity] for quantity in self.quantities]
        return ("E", *(each.scale for each in known), *(each.exponent for each in known))

    @functools.cached_property
    def numbers(self) -> dict[str, Number]:
        return {
            name: _number(self.fit, lambda law: np.log(law.numbers), i)
            for i, name in enumerate(self.names)
        }

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss of such a run by the law; a quantity without a term does not count."""
        place = {
            "parameters": parameters,
            "tokens": tokens,
            "compute": FLOPS * parameters * tokens,
        }
        x_K = [place[quantity] for quantity in self.quantities]
        return float(self.fit.law.loss(np.array([x_K], float))[0])

    def optimum(self, flops: float) -> dict[str, Number]:
        """The parameters, tokens and loss that are best for a budget of 6·N·D FLOPs; of a law of
        compute its loss, without the noise of a single run.

        Raises:
          ValueError: if the law has one of parameters and tokens only.
        """
        if self.of_compute:
            return {"loss": _number(self.fit, lambda law: np.log(law.loss(np.array([[flops]]))))}
        if len(self.quantities) < 2:
            (missing,) = self.fixed
            raise ValueError(
                f"the best share of a budget needs runs of several {missing}: all of these "
                f"have {count_text(self.fixed[missing])}"
            )
        names = ("parameters", "tokens", "loss")
        return {
            name: _number(self.fit, lambda law: _best(law, flops), i)
            for i, name in enumerate(names)
        }

    def __str__(self) -> str:
        """`L = E + A/N^α + B/D^β`, of the terms that it has."""
        known = [_QUANTITIES[quantity] for quantity in self.quantities]
        terms = [f"{each.scale}/{each.letter}^{each.exponent}" for each in known]
        return " + ".join(["L = E", *terms])


def fit_scaling_law(
    parameters_R: Num[np.ndarray, "R"],
    tokens_R: Num[np.ndarray, "R"],
    losses_R: Float[np.ndarray, "R"],
    of_compute: bool = False,
) -> ScalingLaw:
    """The law of runs with these parameters, tokens seen and final losses.

    A quantity that is the same in all runs has no term. With `of_compute` the law is
    L = E + A/C^γ of the compute C = 6·N·D FLOPs (Kaplan et al. 2020, arXiv:2001.08361, §3.3, with
    the floor of Hoffmann et al.): for rungs of one dial, whose tokens follow from their parameters.
    It predicts the next rung, and nothing about other shares of the two.

    Raises:
      ValueError: saying which numbers are not identified and what runs would: a quantity has fewer
        than three values or they span less than a factor of two, of compute four; tokens follow
        from parameters, so that α and β cannot be told apart; there are too few runs; or a term is
        lost in the noise.
    """
    columns = {"parameters": parameters_R.astype(float), "tokens": tokens_R.astype(float)}
    if of_compute:
        columns = {"compute": FLOPS * columns["parameters"] * columns["tokens"]}
    fixed = {name: float(x_R[0]) for name, x_R in columns.items() if len(set(x_R.tolist())) == 1}
    quantities = tuple(name for name in columns if name not in fixed)
    if not quantities:
        raise ValueError(
            f"all runs have the same {' and '.join(columns)}: a law needs runs of at least three "
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
    if not of_compute:
        _check_identified(made, x_RK)
    return made


def _check_values(name: str, x_R: np.ndarray) -> None:
    values, known = sorted(set(x_R.tolist())), _QUANTITIES[name]
    span = values[-1] / values[0]
    if len(values) >= LEAST_VALUES and span >= known.least_range:
        return
    listed = ", ".join(count_text(value) for value in values[:4])
    more = "" if name == "compute" else ", or of a single one"
    raise ValueError(
        f"E, {known.scale} and {known.exponent} are not identified: the runs have {len(values)} "
        f"numbers of {name} ({listed}{', …' * (len(values) > 4)}), which span a factor of "
        f"{span:.2f}; give runs of at least {LEAST_VALUES} that span {known.least_range:.0f}{more}"
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


def _number(fit: Fit, logarithms: Callable[[PowerLaw], Any], index: int = 0) -> Number:
    """One of the positive quantities of a law whose logarithms are given."""
    low, high = fit.interval(lambda law: float(logarithms(law)[index]))
    with np.errstate(over="ignore"):
        return Number(*np.exp([logarithms(fit.law)[index], low, high]).tolist())
