"""The loss of a ladder of runs as L = E + A/N^α + B/D^β, of N parameters and D tokens.

Hoffmann et al. 2022 (arXiv:2203.15556, equations 2 to 4). What the runs do not identify is
refused: see `fit_scaling_law`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float, Num

from lmlib.terminal.quantities import count_text
from lmlib.verdicts.power_law import PowerLaw, fit_power_law, resampled_fits

FLOPS = 6.0  # for each parameter and token
INTERVAL = 0.9  # of what is given as an interval
RESAMPLES = 200
LEAST_VALUES = 3  # of a quantity, for its floor, its scale and its exponent
LEAST_RANGE = 2.0  # the largest over the smallest
_LEAST_SPREAD = 0.1  # of the logarithm of tokens, at one number of parameters
_LEAST_SINGULAR = 1e-5  # of the fit's Jacobian, over the largest

_SYMBOLS = {"parameters": ("A", "α"), "tokens": ("B", "β")}
_LETTERS = {"parameters": "N", "tokens": "D"}


@dataclasses.dataclass(frozen=True)
class Number:
    """A fitted number, and its 90 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """A fit, of one quantity if the other is the same in all runs: E then holds the other's term.

    Args:
      quantities: "parameters", "tokens" or both, in this order.
      fixed: the value of the one that all runs share, if there is one.
      law: of these quantities.
      resampled: fits to resampled losses.
      error: root mean square of the difference in the logarithm of the loss.
      runs: how many it is fitted to.
    """

    quantities: tuple[str, ...]
    fixed: Mapping[str, float]
    law: PowerLaw
    resampled: tuple[PowerLaw, ...]
    error: float
    runs: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers of `law`: E, then A and B, then α and β."""
        symbols = [_SYMBOLS[quantity] for quantity in self.quantities]
        return ("E", *(scale for scale, _ in symbols), *(exponent for _, exponent in symbols))

    @property
    def numbers(self) -> dict[str, Number]:
        resampled = np.stack([each.numbers for each in self.resampled])
        found = zip(self.names, self.law.numbers, resampled.T, strict=True)
        return {name: _number(value, values) for name, value, values in found}

    def loss(self, parameters: float, tokens: float) -> float:
        """What the law says of such a run; a quantity without a term does not count."""
        place = {"parameters": parameters, "tokens": tokens}
        x_K = [place[quantity] for quantity in self.quantities]
        return float(self.law.loss(np.array([x_K], float))[0])

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
        best = np.array(_best(self.law, flops))
        resampled = np.array([_best(each, flops) for each in self.resampled])
        names = ("parameters", "tokens", "loss")
        return {name: _number(best[i], resampled[:, i]) for i, name in enumerate(names)}

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
    resamples: int = RESAMPLES,
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
    law = fit_power_law(x_RK, losses_R)
    errors_R = np.log(law.loss(x_RK)) - np.log(losses_R)
    made = ScalingLaw(
        quantities, fixed, law, (), float(np.sqrt(np.mean(errors_R**2))), len(losses_R)
    )
    _check_identified(made, x_RK)
    resampled = tuple(resampled_fits(x_RK, losses_R, law, resamples))
    return dataclasses.replace(made, resampled=resampled)


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
    law = made.law
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
    """Equation 4 of Hoffmann et al., and the loss there."""
    (a, b), (alpha, beta) = law.scales_K, law.exponents_K
    product = flops / FLOPS  # N·D
    parameters = (alpha * a / (beta * b)) ** (1 / (alpha + beta)) * product ** (
        beta / (alpha + beta)
    )
    tokens = product / parameters
    return parameters, tokens, float(law.loss(np.array([[parameters, tokens]]))[0])


def _number(value: float, resampled: np.ndarray) -> Number:
    return Number(float(value), *interval(resampled))


def interval(resampled: Float[np.ndarray, "resamples"]) -> tuple[float, float]:
    """The ends of 90 %; however few are resampled, as many lie beyond them as are meant to."""
    ends = [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]
    low, high = np.quantile(resampled, ends, method="weibull")
    return float(low), float(high)


def _other(quantity: str) -> str:
    return "tokens" if quantity == "parameters" else "parameters"
