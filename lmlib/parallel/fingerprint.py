"""A digest of distributed arrays, computed in place."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, UInt32

from lmlib.parallel.axes import Weight, map_weights

# Odd constants of splitmix and of Murmur's finalizer, which spread bits.
_STEPS, _FIRST, _SECOND = (0x9E3779B9, 0x7F4A7C15), 0x85EBCA6B, 0xC2B2AE35
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(tree: Any, kept: Callable[[Weight, Array], Any] | None = None) -> str:
    """Returns a digest, in hexadecimal, of the bits, dtypes, shapes and paths of all arrays.

    It does not depend on the layout. It detects changes, but not forgery: for each array it
    includes two 32-bit sums over all elements, each element mixed with its position.

    Args:
      kept: if given, the digest is of `map_weights(kept, tree)`, computed one weight at a time.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    lines = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)} {_sums(leaf).tolist()}"
        for path, leaf in (leaves if kept is None else _each_kept(tree, leaves, kept))
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _each_kept(
    tree: Any, leaves: Sequence[tuple[Any, Array]], kept: Callable[[Weight, Array], Any]
) -> Iterator[tuple[Any, Array]]:
    """Yields the leaves of `map_weights(kept, tree)`."""
    weights = list[Weight]()
    map_weights(lambda weight, _: weights.append(weight), tree)
    for weight, (path, array) in zip(weights, leaves, strict=True):
        for within, leaf in jax.tree_util.tree_leaves_with_path(kept(weight, array)):
            yield (*path, *within), leaf


def sums_of_bits(x: Array) -> UInt32[Array, "2"]:
    """The sums that `fingerprint` compares, for use while a step on a mesh is traced."""
    return _on_mesh(x)


def _sums(x: Array) -> UInt32[Array, "2"]:
    mesh = getattr(x.sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return _jitted(x)
    with jax.set_mesh(mesh):
        return _on_mesh(x)


def _mixed(x: Array) -> UInt32[Array, "2"]:
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    bits = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) % 2**32
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)

    def total(step: int) -> Array:
        mixed = (bits ^ (place * jnp.uint32(step))) * jnp.uint32(_FIRST)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(_SECOND)
        return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)

    return jnp.stack([total(step) for step in _STEPS])


_jitted = jax.jit(_mixed)
_on_mesh = jax.jit(jax.sharding.auto_axes(_mixed, out_sharding=PartitionSpec(None)))
