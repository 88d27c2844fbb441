"""Layers one after the other, and what a model asks of all of them.

A stack is a tuple of segments, one after the other. A segment is a pattern of layers that repeats:
`(local, local, global)` four times is twelve layers. The arrays of each layer of a pattern are
stacked along a leading axis, its repetitions; leading axes have no name and stay whole.

Shapes: B batch, S sequence, E embed, L layers, R repetitions of a pattern.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.layer import Layer, Measuring, check_part
from lmlib.models.matrices.adapted import drops
from lmlib.models.matrices.quantized import check_quantized
from lmlib.models.parts.rope import Rotary, Rotations
from lmlib.models.pipeline.chunks import unstaged
from lmlib.models.pipeline.run import run_in_stages
from lmlib.models.protocol import Context, Names, Part, Reports, Trunk, joined
from lmlib.models.rematerialization import check_names
from lmlib.models.returned import check_scalars
from lmlib.models.scan import Given, Repeated, reshaped, run, stacked
from lmlib.models.weights import fold
from lmlib.parallel.axes import LAYER, map_weights
from lmlib.parallel.collectives import devices_along, platform
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import along

_OF_LAYERS = {
    "rotaries": "lists the rotary tables that it reads, () for none",
    "empty_cache": "makes its cache, or None",
}
Pattern = tuple[Layer, ...]
Stack = tuple[Pattern, ...]


class Segment(NamedTuple):
    """`pattern`: functions that make a layer from a key; `repeats`: how often they follow each
    other."""

    pattern: Sequence[Callable[[PRNGKeyArray], Layer]]
    repeats: int


def segments(layers: Sequence[Callable[[PRNGKeyArray], Layer]]) -> list[Segment]:
    """`layers`, each of which makes its layer from a key, with as few of them to compile as there
    are in the shortest pattern that repeats and what is left over, or in runs of one kind."""
    period = next(
        period
        for period in range(1, len(layers) + 1)
        if all(make is layers[i % period] for i, make in enumerate(layers))
    )
    repeats, left = divmod(len(layers), period)
    runs = [Segment([make], len([*alike])) for make, alike in itertools.groupby(layers)]
    if len(runs) < period + left:
        return runs
    whole = Segment(layers[:period], repeats)
    return [whole, Segment(layers[:left], 1)] if left else [whole]


def make_stack(segments: Sequence[Segment], key: PRNGKeyArray) -> Stack:
    """All layers. A layer's weights depend on `key` and its index only.

    Raises:
      ValueError: if there is no layer.
    """
    stack, first = [], 0
    for pattern, repeats in segments:
        if repeats < 1 or not pattern:
            raise ValueError(f"layers must be at least 1, got {repeats * len(pattern)}")
        keys_L = _layer_keys(key, range(first, first + repeats * len(pattern)))
        stack.append(
            tuple(_stacked(make, keys_L[j :: len(pattern)]) for j, make in enumerate(pattern))
        )
        first += repeats * len(pattern)
    return tuple(stack)


def _stacked(make: Callable[[PRNGKeyArray], Layer], keys_R: Key[Array, "R"]) -> Layer:
    """Layers of these keys, their arrays stacked.

    Raises:
      ValueError: if what `make` gives is no `Layer`, or an array of it is not declared.
    """

    def layer(key: PRNGKeyArray) -> Layer:
        made = make(key)
        check_part(made, "Layer", ("x_BSE", "context", "cache"), _OF_LAYERS)
        map_weights(lambda *_: None, made)
        return made

    return jax.vmap(layer)(keys_R)


def run_stack(
    stack: Stack, x_BSE: Float[Array, "b s embed"], context: Context, cache: Any = None
) -> Trunk:
    """Every layer in its order.

    Each layer's weights are gathered just before its use, and its activations computed again in the
    backward pass but for those that `context.compute` keeps.

    Args:
      x_BSE: laid out as `context.compute.residual` names.
      context: its key descends to layers as that of the weights does, by index.
      cache: of each layer of each pattern, stacked as the weights are: `cache[segment][j]`.
    """
    keys_L = None
    if context.key is not None and (context.dropout > 0 or drops(stack)):
        keys_L = _layer_keys(context.key, range(depth(stack)))
    context = dataclasses.replace(
        context, key=None, rotations=_rotations(stack, context), first_BSE=x_BSE
    )
    rotations = functools.partial(_rotations, stack)
    names = stack_names(stack).saved
    given: list[tuple[Given, ...]] = []
    first = 0
    for number, pattern in enumerate(stack):
        repeats, period = _repeats(pattern), len(pattern)
        keys = tuple(
            None if keys_L is None else keys_L[first + j : first + repeats * period : period]
            for j in range(period)
        )
        layers = Repeated(pattern, keys, (None,) * period if cache is None else cache[number])
        staged = _in_stages(context, repeats, cache)
        is_last_layer = number == len(stack) - 1 and repeats * period == 1
        with jax.named_scope("layers"):
            if is_last_layer and cache is not None and context.wanted_BS is not None:
                # All tokens enter the cache; XLA leaves out what else this call would compute.
                _, (kept,) = run(context, x_BSE, layers, repeats, names)
                layers = layers._replace(caches=(kept.cache,))
                x_BSE, context = _wanted(x_BSE, context)
            if staged:
                x_BSE, given_R = run_in_stages(context, rotations, x_BSE, layers, repeats, names)
            else:
                layers = layers._replace(layers=unstaged(layers.layers))
                x_BSE, given_R = run(context, x_BSE, layers, repeats, names)
        given.append(given_R)
        first += repeats * period
    x_BSE, _ = _wanted(x_BSE, context)
    reports = [each.reports for given_R in given for each in given_R]
    observed = [_by_layer([each.observed for each in given_R]) for given_R in given]
    return Trunk(
        x_BSE,
        Reports(
            _averaged([each.losses for each in reports]),
            _averaged([each.statistics for each in reports]),
            tuple(tuple(each.reports.tallies for each in given_R) for given_R in given),
        ),
        cache and tuple(tuple(each.cache for each in given_R) for given_R in given),
        context.observe and jax.tree.map(lambda *each: jnp.concatenate(each), *observed),
    )


def updated_stack(stack: Stack, tallies: Any) -> Stack:
    """The layers after a step whose whole batch gave these `Reports.tallies`; see
    `lmlib.models.layer.Updating`."""

    def updated(layer: Any, tallies_R: Any) -> Any:
        if tallies_R is None:
            return layer
        layer = gather(layer, jnp.float32)
        if not jax.sharding.get_abstract_mesh().empty:
            layers = jax.typeof(jax.tree.leaves(layer)[0]).sharding.spec[:1]
            tallies_R = jax.sharding.reshard(tallies_R, PartitionSpec(*layers))
        return jax.vmap(lambda layer, tallies: layer.updated(tallies))(layer, tallies_R)

    return tuple(tuple(map(updated, *each)) for each in zip(stack, tallies, strict=True))


def measured_stack(stack: Stack, tallies: Any) -> dict[str, Array]:
    """What layers measure of these tallies, on average; see `lmlib.models.layer.Measuring`."""
    return _averaged(
        [
            jax.vmap(functools.partial(_measured, layer))(tallies_R)
            for pattern, of_pattern in zip(stack, tallies, strict=True)
            for layer, tallies_R in zip(pattern, of_pattern, strict=True)
            if tallies_R is not None and isinstance(layer, Measuring)
        ]
    )


def _measured(layer: Any, tallies: Any) -> dict[str, Array]:
    found: dict[str, Array] = layer.measured(tallies)
    check_scalars(layer, "measured", found)
    return found


def stack_cache(stack: Stack, rows: int, length: int, dtype: DTypeLike) -> Any:
    """An empty cache for `run_stack`, as in `lmlib.models.protocol.Cached`; `None` if a layer has
    none."""
    caches = []
    for pattern in stack:
        of_one = [_one_of(layer).empty_cache(rows, length, dtype) for layer in pattern]
        if None in of_one:
            return None
        repeats = _repeats(pattern)
        caches.append(
            tuple(jax.tree.map(lambda x, n=repeats: stacked(x, n), each) for each in of_one)
        )
    return tuple(caches)


def stack_switches(stack: Stack) -> tuple[int, ...]:
    """See `lmlib.models.protocol.Switching.switches`."""
    switches = {rotary.switch for rotary in _rotaries(stack)}
    return tuple(sorted(switch for switch in switches if switch is not None))


def depth(stack: Stack) -> int:
    """How many layers there are."""
    return sum(_repeats(pattern) * len(pattern) for pattern in stack)


def stack_parts(stack: Stack) -> tuple[Part, ...]:
    """A part for each layer of each pattern, which knows its layers."""
    parts, first = [], 0
    for pattern in stack:
        end = first + _repeats(pattern) * len(pattern)
        parts += [
            Part("layers", block, range(first + j, end, len(pattern)))
            for j, block in enumerate(pattern)
        ]
        first = end
    return tuple(parts)


def stack_names(stack: Stack) -> Names:
    """Of all layers' activations and scopes."""
    return joined(*(layer.names for pattern in stack for layer in pattern))


def stack_flops_per_token(stack: Stack, sequence_length: int, causal: bool) -> float:
    """Of all layers, forward and backward, as `Model.flops_per_token` counts."""
    return sum(
        _repeats(pattern) * _one_of(layer).flops_per_token(sequence_length, causal)
        for pattern in stack
        for layer in pattern
    )


def check_stack(stack: Stack, sequence_length: int, compute: Compute) -> None:
    """Raises ValueError if the layers cannot be computed as `compute` says."""
    check_names(compute, stack_names(stack).saved)
    check_quantized(compute.quantized or {})
    for pattern in stack:
        for layer in pattern:
            _one_of(layer).check(sequence_length, compute)


def _in_stages(context: Context, repeats: int, cache: Any) -> bool:
    """Whether the stages of the mesh share these layers; else all of them compute each layer, of
    their own rows."""
    whole = cache is None and context.observe is None and context.lengths_B is None
    return whole and 1 < devices_along(along(LAYER)) <= repeats


def _rotations(stack: Stack, context: Context) -> dict[Any, Any]:
    """The rotary tables of all layers, each made once, outside of the loop."""
    rotaries = _rotaries(stack)

    def tables() -> list[Rotations]:
        dtype, lengths_B = context.compute.dtype, context.lengths_B
        return [
            rotary.rotations(context.positions_BS, dtype, lengths_B, context.order)
            for rotary in rotaries
        ]

    on_one_cpu = platform() == "cpu" and jax.sharding.get_abstract_mesh().empty
    if context.lengths_B is None or not on_one_cpu:
        return dict(zip(rotaries, tables(), strict=True))
    # Layers that lie apart have no loop: XLA's CPU compiler would take each cosine anew wherever it
    # is read, by every head of every layer, but not out of a branch.
    absent = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(tables))
    made = jax.lax.cond(jnp.any(context.positions_BS >= 0), tables, lambda: absent)
    return dict(zip(rotaries, made, strict=True))


def _rotaries(stack: Stack) -> list[Rotary]:
    """The different ones, in the layers' order."""
    rotaries = (rotary for pattern in stack for layer in pattern for rotary in layer.rotaries)
    return list(dict.fromkeys(rotaries))


def _wanted(x_BSE: Array, context: Context) -> tuple[Array, Context]:
    """The wanted token of each row, and its context; zeros at position -1 where there is none. All
    tokens, if none is said to be wanted."""
    wanted_BS = context.wanted_BS
    if wanted_BS is None:
        return x_BSE, context

    def of(x_BS: Array) -> Array:
        mask_BS = jnp.reshape(wanted_BS, (*wanted_BS.shape, *(1,) * (x_BS.ndim - 2)))
        return jnp.sum(jnp.where(mask_BS, x_BS, 0), axis=1, keepdims=True, dtype=x_BS.dtype)

    return of(x_BSE), dataclasses.replace(
        context,
        positions_BS=of(context.positions_BS + 1) - 1,
        segment_ids_BS=None if context.segment_ids_BS is None else of(context.segment_ids_BS),
        tokens_BS=None if context.tokens_BS is None else of(context.tokens_BS),
        first_BSE=None if context.first_BSE is None else of(context.first_BSE),
        rotations={rotary: Rotations(*map(of, each)) for rotary, each in context.rotations.items()},
        wanted_BS=None,
    )


def _averaged(reports: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """For each name the mean over the layers that have it; values are stacked along R."""
    named: dict[str, list[Array]] = {}
    for each in reports:
        for name, value_R in each.items():
            named.setdefault(name, []).append(value_R)
    return {name: jnp.mean(jnp.concatenate(values)) for name, values in named.items()}


def _by_layer(seen: Sequence[Any]) -> Any:
    """(R, …) of each layer of a pattern, as one (layers, …)."""
    return jax.tree.map(
        lambda *each_R: reshaped(jnp.stack(each_R, axis=1), 2, (len(each_R) * each_R[0].shape[0],)),
        *seen,
    )


def _one_of(layer: Any) -> Any:
    """The shapes of one layer of those that are stacked."""
    return jax.tree.map(lambda w_R: jax.ShapeDtypeStruct(w_R.shape[1:], w_R.dtype), layer)


def _repeats(pattern: Pattern) -> int:
    return jax.tree.leaves(pattern)[0].shape[0]


def _layer_keys(key: PRNGKeyArray, layers: range) -> Key[Array, "L"]:
    """A key for each layer, which depends on `key` and the layer's index only."""
    indices_L = jnp.arange(layers.start, layers.stop, dtype=jnp.int32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(fold(key, "blocks"), indices_L)
