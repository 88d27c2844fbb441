"""Rotary positions (Su et al. 2021, arXiv:2104.09864).

Shapes: B batch, S sequence, H heads, D head_dim; in tables D is half of it.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from lmlib.models.forward_context import ForwardContext

# Length of a document in tokens: one for all tokens, or each token's own.
Length = int | Int32[Array, "#b #s 1 1"]


class Scaling:
    """Base class of frequency changes for longer sequences, compared by value."""

    amplitude: float = 1.0  # factor of cosines and sines
    longest: int | None = None  # length of the longest sequence that has these frequencies
    switch: int | None = None  # length above which a whole document has other frequencies
    pairs: int | None = None  # number of pairs of coordinates that it has factors for

    def frequencies(
        self, frequency_D: Float[Array, "half"], length: Length
    ) -> Float[Array, "*bs1 half"]:
        """Radians per position of each pair in documents of `length`, from unscaled ones."""
        raise NotImplementedError


class Rotations(NamedTuple):
    """Cosine and sine of each position's angle for each pair of coordinates, for all heads."""

    cos_BS1D: Float[Array, "b s 1 half"]
    sin_BS1D: Float[Array, "b s 1 half"]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Settings that define a table of rotations of a head's first `head_dim` coordinates.

    Pair i rotates by position · theta^(-2i / head_dim) radians (eq. 15). It consists of the
    coordinates (2i, 2i + 1) if `interleaved`, else of (i, i + head_dim / 2).
    """

    head_dim: int
    theta: float = 10_000.0
    scaling: Scaling | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not 0 < self.theta < math.inf:
            raise ValueError(f"rope_theta must be positive, got {self.theta}")
        known = None if self.scaling is None else self.scaling.pairs
        if known is not None and known != self.head_dim // 2:
            raise ValueError(
                f"{type(self.scaling).__name__} has factors for {known} pairs, but "
                f"{self.head_dim // 2} pairs of a head's coordinates are rotated"
            )

    @property
    def switches(self) -> tuple[int, ...]:
        """Text lengths beyond which the whole text has other rotations, and its cache again."""
        switch = None if self.scaling is None else self.scaling.switch
        return () if switch is None else (switch,)

    def rotations(
        self,
        positions_BS: Int32[Array, "b s"],
        dtype: DTypeLike,
        lengths_B: Int32[Array, "b"] | None = None,
        order: str = "plain",
    ) -> Rotations:
        """Returns the table for `positions_BS`, in float32, or in `dtype` if it is wider.

        Without `lengths_B` of texts, a document ends where positions stop increasing by one.
        """
        self.check(positions_BS.shape[1])
        wide = jnp.promote_types(dtype, jnp.float32)
        frequency_D = self.theta ** (-jnp.arange(0, self.head_dim, 2, dtype=wide) / self.head_dim)
        amplitude = 1.0
        if self.scaling is not None:
            length = self._length(positions_BS, lengths_B, order)
            frequency_D = self.scaling.frequencies(frequency_D, length)
            amplitude = self.scaling.amplitude
        angle_BS1D = positions_BS[:, :, None, None] * frequency_D
        return Rotations(amplitude * jnp.cos(angle_BS1D), amplitude * jnp.sin(angle_BS1D))

    def __call__(self, context: ForwardContext) -> Rotations:
        """Returns the table of a call's positions: a value of `Context.shared`."""
        dtype, lengths_B = context.compute.dtype, context.lengths_B
        return self.rotations(context.positions_BS, dtype, lengths_B, context.order)

    def _length(self, positions_BS: Array, lengths_B: Array | None, order: str) -> Length:
        """The length of each token's document, if frequencies depend on it."""
        if self.switches and lengths_B is not None:
            return lengths_B[:, None, None, None]
        if self.switches and positions_BS.shape[1] > self.switches[0]:
            from lmlib.models.parts.rope_scaling import document_lengths

            return document_lengths(positions_BS, order)[:, :, None, None]
        return positions_BS.shape[1]

    def check(self, sequence_length: int) -> None:
        """Raises ValueError if the scaling defines no frequencies for this length."""
        longest = None if self.scaling is None else self.scaling.longest
        if longest is not None and sequence_length > longest:
            raise ValueError(
                f"sequences of {sequence_length} tokens, but with {type(self.scaling).__name__} "
                f"scaling rotary positions are known up to {longest}; give shorter ones, or "
                "another rope_scaling"
            )


def rotate(
    x_BSHD: Float[Array, "b s h d"], rotations: Rotations, interleaved: bool = False
) -> Float[Array, "b s h d"]:
    """Rotates pairs of coordinates of `x` (eq. 34), in the table's dtype; others stay the same."""
    cos_BS1D, sin_BS1D = rotations
    D = cos_BS1D.shape[-1]
    wide_BSHD = x_BSHD.astype(cos_BS1D.dtype)
    if interleaved:
        first_BSHD, second_BSHD = wide_BSHD[..., : 2 * D : 2], wide_BSHD[..., 1 : 2 * D : 2]
        rest = [wide_BSHD[..., 2 * D :]]
    else:
        ends = [D] if x_BSHD.shape[-1] == 2 * D else [D, 2 * D]
        first_BSHD, second_BSHD, *rest = jnp.split(wide_BSHD, ends, axis=-1)
    rotated = [
        first_BSHD * cos_BS1D - second_BSHD * sin_BS1D,
        second_BSHD * cos_BS1D + first_BSHD * sin_BS1D,
    ]
    if interleaved:
        rotated = [jnp.stack(rotated, axis=-1).reshape(*x_BSHD.shape[:-1], 2 * D)]
    return jnp.concatenate((*rotated, *rest), axis=-1).astype(x_BSHD.dtype)
