"""A sequence of layers.

A stack is a sequence of patterns. A pattern is a tuple of layers that repeats: `(local, local,
global)` four times is twelve layers. Arrays of each are stacked along an unnamed leading axis.

Shapes: B batch, S sequence, E embed, L layers, R repetitions of a pattern.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.forward_context import FIRST_RESIDUAL, ForwardContext
from lmlib.models.model import TrunkOutput, WeightGroup
from lmlib.models.part import AuxOutputs, Part, check_part, check_scalars, class_name
from lmlib.models.scan import LayerOutputs, StackedLayers, check_names, reshaped, run, stacked
from lmlib.models.weights import fold_in_name
from lmlib.parallel.axes import LAYER, map_weights
from lmlib.parallel.collectives import devices_along, platform
from lmlib.parallel.gathering import gather, unstaged
from lmlib.parallel.layout import mesh_axes_for
from lmlib.parallel.matrix import is_random

MakeLayer = Callable[[PRNGKeyArray], Part]
Pattern = tuple[Part, ...]


class Segment(NamedTuple):
    """A pattern of functions that make a layer from a key, and the number of its repetitions."""

    pattern: Sequence[MakeLayer]
    repeats: int


def segments(layers: Sequence[MakeLayer]) -> list[Segment]:
    """Groups layers, of which equal ones share a function, so that few have to be compiled.

    Returns the shortest pattern that repeats and the remaining layers, or runs of equal layers.
    """
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


class Stack(Part):
    """All layers of a model. A layer's weights depend only on the seed and on the layer's index."""

    rows_may_be_split = True

    patterns: tuple[Pattern, ...]

    def __init__(self, segments: Sequence[Segment], key: PRNGKeyArray):
        patterns, first = [], 0
        for pattern, repeats in segments:
            if repeats < 1 or not pattern:
                raise ValueError(f"layers must be at least 1, got {repeats * len(pattern)}")
            keys_L = _layer_keys(key, range(first, first + repeats * len(pattern)))
            patterns.append(
                tuple(_stacked(make, keys_L[j :: len(pattern)]) for j, make in enumerate(pattern))
            )
            first += repeats * len(pattern)
        self.patterns = tuple(patterns)

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext, cache: Any = None
    ) -> TrunkOutput:
        """Runs every layer in order, each with weights gathered just before its use.

        Keys of layers are folded from the context's. Caches are stacked like weights:
        `cache[pattern][j]`.
        """
        keys_L = None
        if context.key is not None and (context.dropout > 0 or is_random(self.patterns)):
            keys_L = _layer_keys(context.key, range(self.depth))
        context = dataclasses.replace(context, key=None)
        given_to_all = self._given(x_BSE, context)
        context = given_to_all.sharing(self._computed(given_to_all))
        names = self.names.saved
        given: list[tuple[LayerOutputs, ...]] = []
        first = 0
        for number, pattern in enumerate(self.patterns):
            repeats, period = repeats_of(pattern), len(pattern)
            end = first + repeats * period
            starts = range(first, first + period)
            keys = tuple(None if keys_L is None else keys_L[i:end:period] for i in starts)
            caches = (None,) * period if cache is None else cache[number]
            layers = StackedLayers(pattern, keys, caches)
            with jax.named_scope("layers"):
                if _in_stages(context, repeats, cache):
                    from lmlib.models.pipeline.run import run_in_stages  # only stages need it

                    x_BSE, given_R = run_in_stages(
                        given_to_all, self._computed, x_BSE, layers, repeats, names
                    )
                else:
                    layers = layers._replace(layers=unstaged(layers.layers))
                    x_BSE, given_R = run(context, x_BSE, layers, repeats, names)
            given.append(given_R)
            first = end
        aux = [each.aux for given_R in given for each in given_R]
        reports = AuxOutputs(
            _averaged([each.losses for each in aux]),
            _averaged([each.statistics for each in aux]),
            tuple(tuple(each.aux.tallies for each in given_R) for given_R in given),
        )
        cache = cache and tuple(tuple(each.cache for each in given_R) for given_R in given)
        observed = [_by_layer([each.observed for each in given_R]) for given_R in given]
        seen = context.observe and jax.tree.map(lambda *each: jnp.concatenate(each), *observed)
        return TrunkOutput(x_BSE, reports, cache, seen)

    def _given(self, x_BSE: Array, context: ForwardContext) -> ForwardContext:
        """Adds the shared values that need more than the context."""
        if FIRST_RESIDUAL in self.reads and FIRST_RESIDUAL not in context.shared:
            context = context.sharing({FIRST_RESIDUAL: x_BSE})
        for layer in itertools.chain(*self.patterns):
            for key in layer.reads:
                if not callable(key) and key not in context.shared:
                    raise ValueError(
                        f"{class_name(layer)} reads {key!r} from `context.shared`, which the model "
                        "does not give: add it in the model's `trunk`, with `context.sharing`"
                    )
        return context

    def _computed(self, context: ForwardContext) -> dict[Hashable, Any]:
        """The shared values that are functions of the context, computed once, outside the loop."""
        makers = [key for key in self.reads if callable(key)]

        def values() -> list[Any]:
            return [make(context) for make in makers]

        on_one_cpu = platform() == "cpu" and jax.sharding.get_abstract_mesh().empty
        if context.lengths_B is None or not on_one_cpu:
            return dict(zip(makers, values(), strict=True))
        # Without a loop over layers, XLA's CPU compiler computes each cosine again for every head
        # of every layer that reads it. It does not do so for the result of a branch.
        absent = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(values))
        made = jax.lax.cond(jnp.any(context.positions_BS >= 0), values, lambda: absent)
        return dict(zip(makers, made, strict=True))

    def updated(self, tallies: Any) -> "Stack":
        """See `Part.updated`; `tallies` come from `TrunkOutput.aux`."""

        def updated(layer: Part, tallies_R: Any) -> Part:
            if tallies_R is None:
                return layer
            layer = gather(layer, jnp.float32)
            if not jax.sharding.get_abstract_mesh().empty:
                layers = jax.typeof(jax.tree.leaves(layer)[0]).sharding.spec[:1]
                tallies_R = jax.sharding.reshard(tallies_R, PartitionSpec(*layers))
            made: Part = jax.vmap(lambda layer, tallies: layer.updated(tallies))(layer, tallies_R)
            return made

        pairs = zip(self.patterns, tallies, strict=True)
        patterns = tuple(tuple(map(updated, *each)) for each in pairs)
        return eqx.tree_at(lambda stack: stack.patterns, self, patterns)

    def measured(self, tallies: Any) -> dict[str, Array]:
        def measured(layer: Part, tallies_R: Any) -> dict[str, Array]:
            def of_one(tallies: Any) -> dict[str, Array]:
                found = layer.measured(tallies)
                check_scalars(layer, "measured", found)
                return found

            return {} if tallies_R is None else jax.vmap(of_one)(tallies_R)

        layers, of_layers = itertools.chain(*self.patterns), itertools.chain(*tallies)
        return _averaged([*map(measured, layers, of_layers)])

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """See `Part.empty_cache`; `None` if a layer does not support a cache."""
        caches = []
        for pattern in self.patterns:
            of_one = tuple(_one_of(layer).empty_cache(rows, length, dtype) for layer in pattern)
            if None in of_one:
                return None
            copied = functools.partial(stacked, repeats=repeats_of(pattern))
            caches.append(jax.tree.map(copied, of_one))
        return tuple(caches)

    @property
    def depth(self) -> int:
        """The number of layers."""
        return sum(repeats_of(pattern) * len(pattern) for pattern in self.patterns)

    def weight_groups(self) -> tuple[WeightGroup, ...]:
        """A group for each layer of each pattern."""
        groups, first = [], 0
        for pattern in self.patterns:
            end = first + repeats_of(pattern) * len(pattern)
            for j, layer in enumerate(pattern):
                groups.append(WeightGroup("layers", layer, range(first + j, end, len(pattern))))
            first = end
        return tuple(groups)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return sum(
            repeats_of(pattern) * _one_of(layer).flops_per_token(sequence_length, causal)
            for pattern in self.patterns
            for layer in pattern
        )

    def check(self, sequence_length: int, compute: Compute) -> None:
        """See `Part.check`; also checks the names and dtypes that `compute` refers to."""
        check_names(compute, self.names.saved)
        if compute.quantized:
            from lmlib.models.matrices.quantized import check_quantized

            check_quantized(compute.quantized)
        for layer in itertools.chain(*self.patterns):
            _one_of(layer).check(sequence_length, compute)


def _stacked(make: MakeLayer, keys_R: Key[Array, "R"]) -> Part:
    """Makes a layer from each key and stacks their arrays."""

    def layer(key: PRNGKeyArray) -> Part:
        check_part(made := make(key), "x_BSE", "context", "cache")
        map_weights(lambda *_: None, made)
        return made

    return jax.vmap(layer)(keys_R)


def _in_stages(context: ForwardContext, repeats: int, cache: Any) -> bool:
    """True if the mesh's stages split these layers; else each computes all, for its own rows."""
    whole = cache is None and context.observe is None and context.lengths_B is None
    return whole and 1 < devices_along(mesh_axes_for(LAYER)) <= repeats


def _averaged(aux: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """The mean of each name over the layers that have it; values are stacked along R."""
    names = dict.fromkeys(itertools.chain(*aux))
    of_name = {name: [each[name] for each in aux if name in each] for name in names}
    return {name: jnp.mean(jnp.concatenate(values)) for name, values in of_name.items()}


def _by_layer(seen: Sequence[Any]) -> Any:
    """Combines (R, …) of each layer of a pattern into one (layers, …)."""
    return jax.tree.map(lambda *each_R: reshaped(jnp.stack(each_R, axis=1), 2, (-1,)), *seen)


def _one_of(layer: Any) -> Any:
    """The shapes of one of the stacked layers."""
    return jax.tree.map(lambda w_R: jax.ShapeDtypeStruct(w_R.shape[1:], w_R.dtype), layer)


def repeats_of(pattern: Pattern) -> int:
    """The number of repetitions, from the leading axis of the arrays."""
    return jax.tree.leaves(pattern)[0].shape[0]


def _layer_keys(key: PRNGKeyArray, layers: range) -> Key[Array, "L"]:
    """A key for each layer, which depends only on `key` and the layer's index."""
    indices_L = jnp.arange(layers.start, layers.stop, dtype=jnp.int32)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(fold_in_name(key, "blocks"), indices_L)
