"""Rotary frequencies of attention windows that grow during training.

Shapes: D pairs of coordinates of a head.
"""

import dataclasses
import itertools
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.models.parts.rope import Length, Scaling


@dataclasses.dataclass(frozen=True)
class WindowYarn(Scaling):
    """YaRN (arXiv:2309.00071, §3.2) from each of `windows`, in tokens, to the next.

    Pairs that turn often within the old window are kept; others are stretched to the new one, with
    a ramp between `slow` and `fast` turns. Source: modded-nanogpt, record 31.
    """

    windows: tuple[int, ...]
    slow: float = 1.0
    fast: float = 32.0

    def frequencies(
        self, frequency_D: Float[Array, "half"], length: Length
    ) -> Float[Array, "half"]:
        for old, new in itertools.pairwise(self.windows):
            turns_D = old * frequency_D / (2 * math.pi)
            kept_D = jnp.clip((turns_D - self.slow) / (self.fast - self.slow), 0, 1)
            frequency_D = frequency_D * (old / new + kept_D * (1 - old / new))
        return frequency_D

    @property
    def sharper(self) -> float:
        """The factor of attention's scores: 0.2 ln(new / old) + 1 for each change."""
        changes = itertools.pairwise(self.windows)
        return math.prod((0.2 * math.log(new / old) + 1 for old, new in changes), start=1.0)
