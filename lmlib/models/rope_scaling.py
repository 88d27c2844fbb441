"""Rotary frequencies for sequences longer than those a model was first trained on.

Shapes: D pairs of coordinates of a head.
"""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float


@runtime_checkable
class Scaling(Protocol):
    """Settings, compared by value, as a part of `lmlib.models.rope.Rotary`."""

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by."""

    @property
    def longest(self) -> int | None:
        """The longest sequence that has these frequencies; `None` if all have."""

    def frequencies(self, frequency_D: Float[Array, "half"]) -> Float[Array, "half"]:
        """Radians per position of each pair, given the unscaled ones, of falling frequency."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595, eq. 4)."""

    factor: float
    amplitude, longest = 1.0, None

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(self, frequency_D: Float[Array, "half"]) -> Float[Array, "half"]:
        return frequency_D / self.factor


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Unscaled up to `longest` positions (dynamic scaling: arXiv:2309.00071, §3.3). Beyond them
    frequencies would differ from length to length, so longer sequences are refused.

    Args:
      factor: by which longer sequences would be stretched; only kept.
      longest: positions of the training before.
    """

    factor: float
    longest: int
    amplitude = 1.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(self, frequency_D: Float[Array, "half"]) -> Float[Array, "half"]:
        return frequency_D


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1; Dubey et
    al. 2024, arXiv:2407.21783, §3.4.2, with the published code's ramp).

    Args:
      factor: of wavelengths above original / low.
      low, high: turns over `original` positions, between which the ramp lies.
      original: positions of the training before.
    """

    factor: float
    low: float
    high: float
    original: int
    amplitude, longest = 1.0, None

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")

    def frequencies(self, frequency_D: Float[Array, "half"]) -> Float[Array, "half"]:
        turns_D = self.original * frequency_D / (2 * math.pi)
        kept_D = jnp.clip((turns_D - self.low) / (self.high - self.low), 0, 1)
        return kept_D * frequency_D + (1 - kept_D) * frequency_D / self.factor


@dataclasses.dataclass(frozen=True)
class Yarn:
    """Frequencies interpolated by parts, and scores sharpened (Peng et al. 2023, arXiv:2309.00071,
    §3.2 and §3.4).

    Args:
      factor: of long wavelengths.
      theta, original: base of the wavelengths, and positions, of the training before.
      fast, slow: turns over `original` positions above which a pair is kept, and below which it is
        divided by `factor`; β and α of the paper.
      amplitude: of cosines and sines; the paper's √(1/t) is 0.1 ln(factor) + 1.
      whole: round the ends of the ramp to whole pairs, as the published code does.
    """

    factor: float
    theta: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    amplitude: float = 1.0
    whole: bool = True
    longest = None

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(self, frequency_D: Float[Array, "half"]) -> Float[Array, "half"]:
        half = frequency_D.shape[0]

        def pair(turns: float) -> float:
            """The pair that turns so often over the original positions."""
            wavelength = self.original / (2 * math.pi * turns)
            return half * math.log(wavelength) / math.log(self.theta)

        first, last = pair(self.fast), pair(self.slow)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        width = max(last - first, 1e-3)
        divided_D = jnp.clip((jnp.arange(half, dtype=frequency_D.dtype) - first) / width, 0, 1)
        return divided_D * frequency_D / self.factor + (1 - divided_D) * frequency_D


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """0.1 · scale · ln(factor) + 1 (arXiv:2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _check_factor(factor: float) -> None:
    if factor < 1:
        raise ValueError(f"the factor of a rope scaling must be at least 1, got {factor}")
