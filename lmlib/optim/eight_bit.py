"""Optimizer states in 8 bits: block-wise dynamic quantization, around any optimizer."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32, UInt8

from lmlib.optim.from_optax import own_weight
from lmlib.optim.optimizer import Decays, Optimizer
from lmlib.parallel.axes import Weight, map_weights

_FEWEST = 4_096  # elements of an array in 8 bits, as in the paper's code
_SMALLEST = 64  # elements of a block, which has a float32 scale
_SINGLE = "heads", "kv_heads", "experts"  # axes that a mesh may split into single indices
_SECOND_MOMENTS = {"nu", "second"}  # names of arrays without negative values
# Names of products, roots and bases of a matrix's sides: rounded bases are not orthogonal.
_OF_SIDES = "of_rows", "of_columns", "right"


class Codes(eqx.Module):
    """An array in 8 bits: `dynamic_map(signed)[codes]` times its block's scale.

    The array is divided along each axis into as many blocks as `scales` has.
    """

    codes: UInt8[Array, "..."]  # of the array's shape, in its layout
    scales: Float32[Array, "..."]  # largest absolute value of each block
    signed: bool = eqx.field(static=True)


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values of a code, float32, in order (Dettmers et al. 2021, arXiv:2110.02861, §1.3).

    0, 1, and seven decades below 1, each with twice the values of the next smaller one, at even
    distances; each value also with a minus if `signed`, else there are twice as many.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(np.asarray(values, np.float32))


def eight_bit(
    steps: int,
    optimizer: Callable[..., Optimizer],
    tile: int = 16,
    kept: Collection[str] = ("m2",),
    scaled: Any = None,
    decays: Decays | None = None,
) -> Optimizer:
    """An optimizer whose state takes 1 byte for a number (arXiv:2110.02861, §2, without §2.3).

    All arrays of the state with a weight's shape, such as moments, are in 8 bits, in the weight's
    layout. Blocks are squares of `tile` · `tile` elements in the last two axes, except for axes of
    heads and experts, so devices need no elements of others. An update reads and writes float32.

    These stay float32: arrays with fewer than 4,096 elements (norms, biases), with another shape
    than the weight's, or with blocks below 64 elements, because no two axes are divisible; also
    products, roots and bases of the sides of matrices.

    Args:
      steps: length of the schedule; set by the run.
      optimizer: makes the optimizer, as in `Experiment.optimizer`.
      tile: the largest number of a block's indices along an axis. A power of two.
      kept: names of fields of the state that stay float32. AdEMAMix's slow mean moves by less than
        half a code in a step.
      scaled, decays: arguments of `optimizer`, if the experiment sets them.

    Raises:
      ValueError: if `tile` is no power of two; later, if a mesh splits a block.
    """
    if tile < 1 or tile & (tile - 1):
        raise ValueError(f"tile must be a power of two, got {tile}")
    given = {"scaled": scaled, "decays": decays}
    made = optimizer(steps, **{name: x for name, x in given.items() if x is not None})
    inner = optax.with_extra_args_support(made.transformation)

    def init(model: Any) -> optax.OptState:
        weights = {
            tuple(keys): weight
            for keys, weight in jax.tree_util.tree_leaves_with_path(
                map_weights(lambda weight, _: weight, model)
            )
        }
        shapes = {tuple(k): x.shape for k, x in jax.tree_util.tree_leaves_with_path(model)}

        def narrowed(keys: tuple[Any, ...], array: Array) -> Any:
            own = own_weight(keys, weights)
            names = {getattr(key, "name", getattr(key, "key", None)) for key in keys}
            if own is None or array.shape != shapes[own] or array.dtype != jnp.float32:
                return array
            block = _block(weights[own], array.shape, tile)
            if array.size < _FEWEST or math.prod(block) < _SMALLEST or names & {*kept}:
                return array
            if any(isinstance(name, str) and name.endswith(_OF_SIDES) for name in names):
                return array
            _check(weights[own], array, block)
            return _coded(array, block, not names & _SECOND_MOMENTS)

        return jax.tree_util.tree_map_with_path(narrowed, inner.init(model))

    def update(
        gradients: Any, state: Any, model: Any = None, **given: Any
    ) -> tuple[Any, optax.OptState]:
        updates, new = inner.update(gradients, _widened(state), model, **given)

        def narrowed(old: Any, array: Array) -> Any:
            if not isinstance(old, Codes):
                return array
            blocks = zip(old.codes.shape, old.scales.shape, strict=True)
            return _coded(array, [size // count for size, count in blocks], old.signed)

        return updates, jax.tree.map(narrowed, state, new, is_leaf=_is_codes)

    return made._replace(
        transformation=optax.GradientTransformationExtraArgs(init, update),
        metrics=lambda state: made.metrics(_widened(state)),
    )


def _block(weight: Weight, shape: Sequence[int], tile: int) -> list[int]:
    """The size of a block along each axis."""
    block = [1] * len(shape)
    own = range(weight.stacked, len(shape))
    several = [i for i in own if weight.axes[i] not in _SINGLE]
    for i in several[-2:]:
        block[i] = math.gcd(shape[i], tile)
    return block


def _check(weight: Weight, array: Array, block: Sequence[int]) -> None:
    here = jax.typeof(array).sharding.shard_shape(array.shape)
    for axis, size, of_block in zip(weight.axes, here, block, strict=True):
        if size % of_block:
            raise ValueError(
                f"each device holds {size} indices of {axis} of {weight.path}, and blocks of "
                f"eight_bit hold {of_block}: give eight_bit tile={math.gcd(size, of_block)}, or "
                "split the axis less"
            )


def _is_codes(node: Any) -> bool:
    return isinstance(node, Codes)


def _widened(state: Any) -> Any:
    """The state in float32."""
    return jax.tree.map(
        lambda leaf: _decoded(leaf) if _is_codes(leaf) else leaf, state, is_leaf=_is_codes
    )


def _coded(x: Array, block: Sequence[int], signed: bool) -> Codes:
    """The nearest codes of `x`, divided by each block's largest absolute value."""
    values = dynamic_map(signed)
    middles = (values[:-1] + values[1:]) / 2
    counts = [size // of_block for size, of_block in zip(x.shape, block, strict=True)]

    def coded(x: Array) -> tuple[Array, Array]:
        blocks = jnp.reshape(x, _split(counts, block))
        inside = tuple(range(1, blocks.ndim, 2))
        scales = jnp.max(jnp.abs(blocks), axis=inside, keepdims=True)
        fractions = blocks / jnp.where(scales > 0, scales, 1)
        codes = jnp.searchsorted(jnp.asarray(middles), fractions, side="right")
        return jnp.reshape(codes.astype(jnp.uint8), x.shape), jnp.reshape(scales, counts)

    codes, scales = _on_each_device(coded, x, (x, x))(x)
    return Codes(codes, scales, signed)


def _decoded(x: Codes) -> Array:
    counts = x.scales.shape
    block = [size // count for size, count in zip(x.codes.shape, counts, strict=True)]

    def decoded(codes: Array, scales: Array) -> Array:
        values = jnp.asarray(dynamic_map(x.signed))[codes.astype(jnp.int32)]
        blocks = jnp.reshape(values, _split(counts, block))
        scales = jnp.reshape(scales, _split(counts, [1] * len(counts)))
        return jnp.reshape(blocks * scales, codes.shape)

    return _on_each_device(decoded, x.codes, x.codes)(x.codes, x.scales)


def _split(counts: Sequence[int], block: Sequence[int]) -> list[int]:
    return [size for pair in zip(counts, block, strict=True) for size in pair]


def _on_each_device(function: Callable[..., Any], like: Array, outputs: Any) -> Any:
    """`function` with outputs in the layout of `like`; a block is on one device."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    layout: PartitionSpec = jax.typeof(like).sharding.spec
    return jax.sharding.auto_axes(function, out_sharding=jax.tree.map(lambda _: layout, outputs))
