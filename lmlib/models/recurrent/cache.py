"""The cache of a recurrent layer, of constant size.

Shapes: B batch, H heads, K key_dim, V value_dim, W width.
"""

import equinox as eqx
from jaxtyping import Array, Float


class RecurrentState(eqx.Module):
    """The state after the last token, and the last W - 1 inputs of each convolution."""

    state: Float[Array, "b heads key_dim value_dim"]
    windows: tuple[Float[Array, "b before ..."], ...]
