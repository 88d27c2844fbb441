"""The cache of a recurrent layer, of constant size.

Shapes: B batch, H heads, K key_dim, V value_dim, W width.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from lmlib.parallel.axes import Axes
from lmlib.parallel.layout import COMPUTE, repeats, reshard


class RecurrentState(eqx.Module):
    """The state after the last token, and the last W - 1 inputs of each convolution.

    A layer that is only a convolution lacks the state.
    """

    state: Float[Array, "b heads key_dim value_dim"] | None
    windows: tuple[Float[Array, "b before ..."], ...]


def empty(axes: Axes, shape: tuple[int, ...], dtype: DTypeLike) -> Shaped[Array, "b ..."]:
    """Returns zeros, with "kv_heads" repeated as in use over `tensor`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        pairs = zip(axes, shape, strict=True)
        shape = tuple(size * repeats(axis, size, COMPUTE, mesh) for axis, size in pairs)
    return reshard(jnp.zeros(shape, dtype), axes)
