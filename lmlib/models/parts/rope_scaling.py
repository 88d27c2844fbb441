"""Rotary frequencies for sequences longer than the ones that a model was first trained on.

Shapes: B batch, S sequence, D pairs of coordinates of a head.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lmlib.models.parts.rope import Length, Scaling
from lmlib.parallel.rows import gathered_rows, split_rows


@dataclasses.dataclass(frozen=True)
class Linear(Scaling):
    """Positions divided by `factor` (Chen et al. 2023, arXiv:2306.15595, eq. 4)."""

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(
        self, frequency_D: Float[Array, "half"], length: Length
    ) -> Float[Array, "half"]:
        return frequency_D / self.factor


@dataclasses.dataclass(frozen=True)
class Dynamic(Scaling):
    """Unscaled up to `longest` positions; longer sequences are refused (arXiv:2309.00071, §3.3).

    Beyond `longest` each length would need its own frequencies. `factor` is stored, but not used.
    """

    factor: float
    longest: int = dataclasses.field()  # without the default of `Scaling`

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(
        self, frequency_D: Float[Array, "half"], length: Length
    ) -> Float[Array, "half"]:
        return frequency_D


@dataclasses.dataclass(frozen=True)
class Llama3(Scaling):
    """Long wavelengths divided by `factor`, short ones kept, and a ramp between them.

    Used by Llama 3.1 (Dubey et al. 2024, arXiv:2407.21783, §3.4.2, with the published code's ramp).
    The ramp's ends `low` and `high` are in turns over the `original` positions.
    """

    factor: float
    low: float
    high: float
    original: int

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if not self.low < self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")

    def frequencies(
        self, frequency_D: Float[Array, "half"], length: Length
    ) -> Float[Array, "half"]:
        turns_D = self.original * frequency_D / (2 * math.pi)
        kept_D = jnp.clip((turns_D - self.low) / (self.high - self.low), 0, 1)
        return kept_D * frequency_D + (1 - kept_D) * frequency_D / self.factor


@dataclasses.dataclass(frozen=True)
class Yarn(Scaling):
    """Frequencies interpolated by parts, and sharper scores (arXiv:2309.00071, §3.2 and §3.4).

    Args:
      factor: divisor of the frequencies with long wavelengths.
      theta, original: base of the wavelengths, and positions, in the original training.
      fast, slow: turns over `original` positions above which a pair is kept, and below which it
        is divided; β and α of the paper.
      amplitude: factor of cosines and sines; the paper's √(1/t) is 0.1 ln(factor) + 1.
      whole: True rounds the ends of the ramp to whole pairs, as the published code does.
    """

    factor: float
    theta: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    amplitude: float = 1.0
    whole: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if self.theta <= 1:
            raise ValueError(f"yarn needs a base above 1, got rope_theta = {self.theta}")

    def frequencies(
        self, frequency_D: Float[Array, "half"], length: Length
    ) -> Float[Array, "half"]:
        half = frequency_D.shape[0]

        def pair(turns: float) -> float:
            """The index of the pair with this number of turns over the original positions."""
            wavelength = self.original / (2 * math.pi * turns)
            return half * math.log(wavelength) / math.log(self.theta)

        first, last = pair(self.fast), pair(self.slow)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        width = max(last - first, 1e-3)
        divided_D = jnp.clip((jnp.arange(half, dtype=frequency_D.dtype) - first) / width, 0, 1)
        return divided_D * frequency_D / self.factor + (1 - divided_D) * frequency_D


@dataclasses.dataclass(frozen=True)
class LongRope(Scaling):
    """Divides pairs' frequencies by `short`, or by `long` in documents above `original` tokens.

    Source: Ding et al. 2024, arXiv:2402.13753, §3.2. Each document chooses for itself;
    `transformers` chooses once for the whole call. In generation, a text that grows beyond
    `original` is computed again. `amplitude` multiplies cosines and sines.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float = 1.0
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        for name in ("short", "long"):  # a config has lists, but settings are compared and hashed
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        if len(self.short) != len(self.long):
            raise ValueError(
                "short and long must have a factor for each pair, got "
                f"{len(self.short)} and {len(self.long)}"
            )
        if not all(factor > 0 for factor in (*self.short, *self.long)):
            raise ValueError(f"short and long must be positive, got {self.short} and {self.long}")

    @property
    def switch(self) -> int:  # type: ignore[override]
        return self.original

    @property
    def pairs(self) -> int:  # type: ignore[override]
        return len(self.short)

    def frequencies(
        self, frequency_D: Float[Array, "half"], length: Length
    ) -> Float[Array, "*bs1 half"]:
        short_D, long_D = (jnp.asarray(each, frequency_D.dtype) for each in (self.short, self.long))
        return frequency_D / jnp.where(length > self.original, long_D, short_D)


def document_lengths(
    positions_BS: Int32[Array, "b s"], order: str = "plain"
) -> Int32[Array, "b s"]:
    """The length of each token's document, which ends where positions stop increasing by one.

    Rows are in `order` along `context`, and are gathered.
    """
    S = positions_BS.shape[1]
    positions_BS = gathered_rows(positions_BS, order)
    goes_on_BS = positions_BS[:, 1:] == positions_BS[:, :-1] + 1
    ends_BS = jnp.pad(~goes_on_BS, ((0, 0), (0, 1)), constant_values=True)
    index_S = jnp.arange(S, dtype=jnp.int32)
    end_BS = jax.lax.cummin(jnp.where(ends_BS, index_S, S), axis=1, reverse=True)
    return split_rows(positions_BS + end_BS - index_S + 1, order)


def long_rope_amplitude(factor: float, original: int) -> float:
    """√(1 + ln(factor) / ln(original)), as in the code published with Phi-3."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """0.1 · scale · ln(factor) + 1 (arXiv:2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _check_factor(factor: float) -> None:
    if factor < 1:
        raise ValueError(f"the factor of a rope scaling must be at least 1, got {factor}")
