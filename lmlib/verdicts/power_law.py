"""Fits a loss as a floor plus a power law in each of several quantities.

    L = E + Σ_k C_k / x_k^γ_k

Approach 3 of Hoffmann et al. 2022 (arXiv:2203.15556, §3.3 and appendix D.3): a Huber loss of width
0.001 on the difference of logarithms, from several starts, until it converges (the paper's own did
not: Besiroglu et al. 2024, arXiv:2404.10102). Suffixes: R runs, K quantities.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import optimize, special

INTERVAL = 0.9
_HUBER_WIDTH = 1e-3  # in logarithms: 0.1 % of the loss
_LEAST_SQUARES = 1e3  # a width larger than any difference
_LEAST_ERROR = 1e-10  # over all logarithms: rounding
_FARTHEST = 80.0  # largest distance to an interval's end, in logarithms
_EXPONENTS = (0.15, 0.4, 0.8)  # starting values
_STARTS = 3  # number of grid points to start from, the best ones
_LEAST_TERM = 1e-3  # fraction of the loss, for starts with a zero term


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """A fitted law: `floor` is E, `scales_K` the C_k and `exponents_K` the γ_k.

    C_k has the unit of the loss times x_k^γ_k.
    """

    floor: float
    scales_K: Float[np.ndarray, "K"]
    exponents_K: Float[np.ndarray, "K"]

    def loss(self, x_RK: Float[np.ndarray, "R K"]) -> Float[np.ndarray, "R"]:
        return self.floor + np.sum(self.scales_K * x_RK**-self.exponents_K, axis=1)

    @property
    def numbers(self) -> Float[np.ndarray, "numbers"]:
        """All parameters: E, then all C_k, then all γ_k."""
        return np.concatenate([[self.floor], self.scales_K, self.exponents_K])


class Fit:
    """The law with the smallest Huber loss for positive `x_RK` and losses, and its intervals.

    The parameters θ are the logarithms of E, of all C_k and of all γ_k. Each x_k is divided by its
    geometric mean, so that the terms have size 1.
    """

    def __init__(self, x_RK: Float[np.ndarray, "R K"], losses_R: Float[np.ndarray, "R"]):
        self.x_RK, self.losses_R = x_RK, losses_R
        self._middle_K = np.log(x_RK).mean(0)
        self._u_RK = np.log(x_RK) - self._middle_K
        self._count = count = x_RK.shape[1]
        # Bounds far from any fit that still avoid overflow.
        self._low, self._high = np.array([[-40.0, 40.0]] * (1 + count) + [[-12.0, 3.0]] * count).T
        self._theta = self._least(_HUBER_WIDTH)
        self.law = self._law(self._theta)

    @property
    def error(self) -> float:
        """Root mean square of the residuals of the log loss."""
        return float(np.sqrt(np.mean(self._residuals(self._theta) ** 2)))

    @property
    def slopes(self) -> Float[np.ndarray, "R numbers"]:
        """Derivatives of the log losses by the logarithms of `PowerLaw.numbers`."""
        return self._jacobian(self._theta)

    def interval(self, logarithm: Callable[[PowerLaw], float]) -> tuple[float, float]:
        """Returns the 90 % profile-likelihood interval of the logarithm of a quantity of the law.

        It holds the values reached by laws with p parameters whose sum of squared errors is at most
        1 + F/(R - p) times the minimum, for the 90 % quantile F with 1 and R - p degrees of freedom
        (Bates and Watts 1988, Nonlinear Regression Analysis and Its Applications, §6.1), and the
        value of `law`. An end that the losses don't bound is infinite.
        """
        freedom = len(self.losses_R) - len(self._low)
        size = math.sqrt(max(self._squares(self._least_squares), _LEAST_ERROR**2))
        reach = size * math.sqrt(float(special.fdtri(1, freedom, INTERVAL)) / freedom)
        low, high = (self._end(logarithm, side * reach) for side in (-1, 1))
        return min(low, at := logarithm(self.law)), max(high, at)

    @functools.cached_property
    def _least_squares(self) -> np.ndarray:
        return self._least(_LEAST_SQUARES)

    def _law(self, theta: np.ndarray) -> PowerLaw:
        exponents_K = np.exp(theta[1 + self._count :])
        with np.errstate(over="ignore"):
            scales_K = np.exp(theta[1 : 1 + self._count] + exponents_K * self._middle_K)
        return PowerLaw(math.exp(theta[0]), scales_K, exponents_K)

    def _terms(self, theta: np.ndarray) -> np.ndarray:
        scales_K, exponents_K = theta[1 : 1 + self._count], np.exp(theta[1 + self._count :])
        powers_RK = np.exp(scales_K - exponents_K * self._u_RK)
        return np.column_stack([np.full(len(powers_RK), np.exp(theta[0])), powers_RK])

    def _residuals(self, theta: np.ndarray) -> np.ndarray:
        return np.log(self._terms(theta).sum(1)) - np.log(self.losses_R)

    def _squares(self, theta: np.ndarray) -> float:
        return float(np.sum(self._residuals(theta) ** 2))

    def _jacobian(self, theta: np.ndarray) -> np.ndarray:
        terms_R = self._terms(theta)
        shares_R = terms_R / terms_R.sum(1, keepdims=True)
        by_exponent = -shares_R[:, 1:] * np.exp(theta[1 + self._count :]) * self._u_RK
        return np.hstack([shares_R, by_exponent])

    def _least(self, width: float) -> np.ndarray:
        """Returns the θ with the smallest Huber loss of this width."""
        starts = []  # a grid over exponents; E and the C_k solve a linear problem for each
        for exponents in itertools.product(_EXPONENTS, repeat=self._count):
            powers_RK = np.exp(-np.array(exponents) * self._u_RK)
            design = np.column_stack([np.ones(len(powers_RK)), powers_RK]) / self.losses_R[:, None]
            terms, error = optimize.nnls(design, np.ones(len(powers_RK)))
            terms = np.maximum(terms, _LEAST_TERM * self.losses_R.min())
            starts.append((error, np.log(np.concatenate([terms, exponents]))))
        starts.sort(key=lambda each: each[0])
        functions = self._residuals, self._jacobian
        solved = [self._solve(start, width, *functions) for _, start in starts[:_STARTS]]
        return min(solved, key=lambda each: each.cost).x

    def _solve(
        self, start: np.ndarray, width: float, residuals: Any, jacobian: Any
    ) -> optimize.OptimizeResult:
        """Minimizes the Huber loss of the residuals."""
        start = np.clip(start, self._low + 1, self._high - 1)  # small steps at bounds
        limits = {"xtol": 1e-10, "ftol": 1e-12, "gtol": 1e-12, "max_nfev": 1_000}
        huber = {"bounds": (self._low, self._high), "loss": "huber", "f_scale": width}
        return optimize.least_squares(residuals, start, jacobian, **huber, **limits)

    def _end(self, q: Callable[[PowerLaw], float], reach: float) -> float:
        """Returns the value of q at which the profile's sum of squares has risen by reach².

        Searches above the best fit's value, or below it for a negative `reach`.
        """
        least = self._least_squares
        base, middle = self._squares(least), q(self._law(least))
        nudges = 1e-6 * np.eye(len(least))

        def slope(theta: np.ndarray) -> np.ndarray:
            ends = [[q(self._law(theta + side * e)) for side in (1, -1)] for e in nudges]
            return np.array([(up - down) / 2e-6 for up, down in ends])

        if not slope(least).any():
            return middle  # every law reaches this value
        standard = np.linalg.lstsq(self._jacobian(least).T, slope(least), rcond=None)[0]
        distance = min(abs(reach) * float(np.linalg.norm(standard)), 1.0) or 1.0
        weight, found = 10 * abs(reach) / distance, {0.0: least}

        def rise(distance: float) -> float:
            """Minimises S + w²(q - goal)²; no other law with the same q has a smaller S."""
            if distance not in found:
                goal = middle + math.copysign(distance, reach)
                found[distance] = self._solve(
                    found[max(each for each in found if each < distance)], _LEAST_SQUARES,
                    lambda t: np.append(self._residuals(t), weight * (q(self._law(t)) - goal)),
                    lambda t: np.vstack([self._jacobian(t), weight * slope(t)]),
                ).x  # fmt: skip
            return math.sqrt(max(self._squares(found[distance]) - base, 0.0)) - abs(reach)

        while rise(distance) < 0:
            distance *= 2
            if distance > _FARTHEST:
                return math.copysign(math.inf, reach)
        end = optimize.brentq(rise, 0.0, distance, xtol=1e-3 * distance)
        return q(self._law(found[end]))
