"""Pipeline parallelism within one program: layers split into stages.

In each slot of the schedule all stages compute at once, each for a different microbatch, and the
results move on by one stage (a ppermute). In the backward pass JAX reverses the loop over slots.
Microbatches of a group wait, one at each stage, and move on by one stage each slot (Xu et al. 2021,
arXiv:2105.04663, §3.3). Each device contributes some of its rows to each of them.

Shapes: B batch, W rows of a microbatch, S sequence, E embed, P stages, G groups, M microbatches =
groups × stages, T slots, R repetitions of a pattern, K repetitions of a chunk, V rounds.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from lmlib.models.forward_context import ForwardContext
from lmlib.models.pipeline.schedule import Schedule, Work, schedule_of
from lmlib.models.scan import LayerOutputs, StackedLayers, counted, reshaped, run
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.collectives import all_gather, shard_map
from lmlib.parallel.exchange import ring_shift
from lmlib.parallel.layout import mesh_axes_for, partition, storage_spec
from lmlib.parallel.stages import each_stage


def split_into_chunks(repeated: StackedLayers, repeats: int, schedule: Schedule) -> StackedLayers:
    """Splits stacked layers (R, …) into the chunks of each stage, (P, K, V, …).

    If each stage has one chunk, and all the same number of layers, nothing moves. Otherwise weights
    are sent to their stages, and their gradients back. A chunk with too few layers is padded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    stages, rounds = schedule.stages, schedule.rounds
    each = -(-repeats // (stages * rounds))

    def chunk(weight: Weight, w_R: Array) -> Array:
        of_stages = storage_spec(weight, (stages, *w_R.shape[1:]), mesh).partitions
        layout = PartitionSpec(of_stages[0], None, None, *of_stages[1:])
        if (rounds, repeats) == (1, stages * each):
            return jnp.reshape(w_R, (stages, each, 1, *w_R.shape[1:]), out_sharding=layout)
        whole_R = jax.sharding.reshard(w_R, storage_spec(weight.unstaged, w_R.shape, mesh))
        return jax.sharding.reshard(cut(whole_R), layout)

    def cut(x_R: Array) -> Array:
        lacking = stages * rounds * each - repeats
        x_R = jnp.concatenate([x_R, *[x_R[-1:]] * lacking])
        return jnp.moveaxis(reshaped(x_R, 1, (rounds, stages, each)), 0, 2)

    def chunk_alike(x_R: Array) -> Array:
        return jax.sharding.reshard(cut(x_R), partition("stages"))

    counts = None
    if repeats < stages * rounds * each:
        numbers_VPK = np.arange(stages * rounds * each).reshape(rounds, stages, each)
        counts_PKV = jnp.asarray(np.moveaxis(numbers_VPK < repeats, 0, 2))
        counts = jax.sharding.reshard(counts_PKV, partition("stages"))
    layers, keys = map_weights(chunk, repeated.layers), jax.tree.map(chunk_alike, repeated.keys)
    return StackedLayers(layers, keys, repeated.caches, counts)


def to_microbatches(
    x_BSE: Float[Array, "b s embed"], groups: int, residual: str
) -> Float[Array, "p g w s embed"]:
    """Arranges the batch as waiting microbatches; nothing is sent."""

    def local(x_BSE: Array) -> Array:
        return jnp.reshape(x_BSE, (1, groups, -1, *x_BSE.shape[1:]))

    return shard_map(local, (partition(residual),), partition(_waiting(residual)))(x_BSE)


def from_microbatches(
    x_PGWSE: Float[Array, "p g w s embed"], residual: str
) -> Float[Array, "b s embed"]:
    """The inverse of `to_microbatches`."""

    def local(x_PGWSE: Array) -> Array:
        return jnp.reshape(x_PGWSE, (-1, *x_PGWSE.shape[3:]))

    return shard_map(local, (partition(_waiting(residual)),), partition(residual))(x_PGWSE)


def gather_over_stages(x_BS: Array, groups: int) -> Array:
    """Gathers values of each token on all stages, by microbatches (M, W, S) (an all-gather)."""

    def local(x_BS: Array) -> Array:
        x_GWS = jnp.reshape(x_BS, (groups, 1, -1, x_BS.shape[1]))
        x_GPWS = all_gather(x_GWS, mesh_axes_for("stages"), 1)
        return jnp.reshape(x_GPWS, (-1, *x_GPWS.shape[2:]))

    return shard_map(
        local, (partition("batch seq"),), partition((None, "stage_batch", "seq")), tracked=False
    )(x_BS)


def waiting_in_group(waiting_PGWSE: Array, group: Int32[Array, ""]) -> Array:
    """The waiting microbatches of a group, (P, W, S, E); the first stage's is next."""
    return jax.lax.dynamic_index_in_dim(waiting_PGWSE, group, 1, keepdims=False)


def shift_waiting(
    waiting_PGWSE: Array,
    group: Int32[Array, ""],
    residual: str,
    ended: tuple[Bool[Array, "p"], Array] | None = None,
) -> Array:
    """Moves the waiting microbatches of a group (-1: none) one stage closer to the first (a
    ppermute).

    `ended` are True at a stage whose microbatch has finished, and these microbatches, which wait in
    the place of those that move from the first stage to the last.
    """

    def moved(x_PGWSE: Array) -> Array:
        x_PWSE = _passed_on(waiting_in_group(x_PGWSE, group), residual, -1)
        if ended is not None:
            x_PWSE = each_stage(jnp.where)(*ended, x_PWSE)
        return jax.lax.dynamic_update_index_in_dim(x_PGWSE, x_PWSE, group, 1)

    return jax.lax.cond(group >= 0, moved, lambda x_PGWSE: x_PGWSE, waiting_PGWSE)


def _passed_on(x_PWSE: Array, residual: str, stages: int) -> Array:
    """Sends each stage's microbatch `stages` stages further, in a ring (a ppermute)."""
    layout = partition(("stages", *_in_stages(residual)))
    shift = functools.partial(ring_shift, mesh_axes=mesh_axes_for("stages"), devices=stages)
    return shard_map(shift, (layout,), layout)(x_PWSE)


def _in_stages(residual: str) -> tuple[str, ...]:
    return ("stage_batch", *residual.split()[1:])


def _waiting(residual: str) -> tuple[str | None, ...]:
    return ("stages", None, *_in_stages(residual))


_OF_TOKENS = ("positions_BS", "segment_ids_BS", "counts_BS")


def run_in_stages(
    context: ForwardContext,
    computed: Callable[[ForwardContext], dict[Hashable, Any]],
    x_BSE: Float[Array, "b s embed"],
    repeated: StackedLayers,
    repeats: int,
    names: Sequence[str],
) -> tuple[Float[Array, "b s embed"], tuple[LayerOutputs, ...]]:
    """`lmlib.models.scan.run` with layers split over the stages; at most as many as repetitions.

    Shared values in `context` are integers, for which every stage keeps all rows, or activations,
    which travel with the residual stream. `computed` computes the others from a context.
    """
    residual = context.compute.residual
    schedule = schedule_of(len(x_BSE), context.compute, jax.sharding.get_abstract_mesh())
    chunks = split_into_chunks(repeated, repeats, schedule)
    of_tokens = {
        name: gather_over_stages(x_BS, schedule.groups)
        for name in _OF_TOKENS
        if (x_BS := getattr(context, name)) is not None
    }

    activations, integers = _parted(context.shared)
    integers = jax.tree.map(lambda x_BS: gather_over_stages(x_BS, schedule.groups), integers)

    def stage(entering: Any, at: Any, chunks: StackedLayers, work: Work) -> tuple[Any, Any]:
        x_WSE, moved = jax.tree.map(functools.partial(jnp.where, work.begins), entering, at)
        of_own: dict[str, Any] = {
            name: _at(x_MWS, work.microbatch) for name, x_MWS in of_tokens.items()
        }
        kept = jax.tree.map(lambda x_MWS: _at(x_MWS, work.microbatch), integers)
        own = dataclasses.replace(context, shared={**moved, **kept}, **of_own)
        own = own.sharing(computed(own))
        keys, counts = jax.tree.map(
            lambda x_KV: _at(jnp.swapaxes(x_KV, 0, 1), work.round), (chunks.keys, chunks.counts)
        )
        keys = jax.tree.map(lambda key_K: fold(key_K, work.microbatch), keys)
        chunk = chunks._replace(keys=keys, counts=counts)
        length = jax.tree.leaves(chunk.layers)[0].shape[0]
        with jax.named_scope("layers"):
            y_WSE, given = run(own, x_WSE, chunk, length, names, of_round(work.round))
        return (y_WSE, moved), tuple(counted(each.aux, work.counts) for each in given)

    fold = jax.vmap(jax.random.fold_in, (0, None))

    def of_round(round: Array) -> Callable[[Any], Any]:
        return lambda layer_V: jax.tree.map(lambda w_V: _at(w_V, round), layer_V)

    def slot(carry: Any, moment: tuple[Work, Array, Array]) -> tuple[Any, Any]:
        (waiting, at), (work, begins, ends) = carry, moment
        entering = jax.tree.map(lambda each: waiting_in_group(each, begins), waiting)
        waiting = jax.tree.map(lambda each: shift_waiting(each, begins, residual), waiting)
        made, aux = each_stage(stage)(entering, at, chunks, work)
        x_waiting = shift_waiting(waiting[0], ends, residual, (work.ends, made[0]))
        made = jax.tree.map(lambda each: _passed_on(each, residual, 1), made)
        return ((x_waiting, waiting[1]), made), aux

    waiting = jax.tree.map(
        lambda each: to_microbatches(each, schedule.groups, residual), (x_BSE, activations)
    )
    # A stage without its first microbatch computes one that waits there; the result does not count.
    at = jax.tree.map(lambda each: waiting_in_group(each, jnp.int32(0)), waiting)
    with jax.named_scope("slots"):
        (waiting, _), reports_TPK = jax.lax.scan(slot, (waiting, at), _moments(schedule))
    aux = jax.tree.map(lambda each: _by_layer(each, schedule, repeats), reports_TPK)
    return from_microbatches(waiting[0], residual), tuple(
        LayerOutputs(each, None, None) for each in aux
    )


def _parted(shared: Mapping[Hashable, Any]) -> tuple[dict[Hashable, Any], dict[Hashable, Any]]:
    """Splits shared values into activations, in the layout of the residual stream, and integers."""
    parts: tuple[dict[Hashable, Any], dict[Hashable, Any]] = {}, {}
    for key, value in shared.items():
        kinds = {jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(value)}
        parts[kinds == {True}][key] = value
    return parts


def _moments(schedule: Schedule) -> tuple[Work, Array, Array]:
    """For each slot the work of each stage, `Schedule.begins` and `Schedule.ends`."""

    def array(x: np.ndarray) -> Array:
        return jnp.asarray(x, x.dtype if x.dtype == bool else jnp.int32)

    def laid_out(x_TP: np.ndarray) -> Array:
        return jax.sharding.reshard(array(x_TP), partition((None, "stages")))

    work = jax.tree.map(laid_out, schedule.work())
    return work, array(schedule.begins()), array(schedule.ends())


def _at(x: Array, index: Int32[Array, ""]) -> Array:
    """`x[index]`, for an axis that is whole."""
    places = jax.typeof(x).sharding.spec.partitions
    taken = shard_map(
        lambda x, index: jax.lax.dynamic_index_in_dim(x, index, keepdims=False),
        (PartitionSpec(*places), PartitionSpec()),
        PartitionSpec(*places[1:]),
    )
    return taken(x, index)


def _by_layer(reported_TPK: Array, schedule: Schedule, repeats: int) -> Array:
    """The reports of each layer's chunk, summed over the slots, (R, …)."""
    round_T1P = schedule.work().round[:, None]
    of_round_TVP = round_T1P == np.arange(schedule.rounds)[:, None]
    whole_TPK = jax.sharding.reshard(reported_TPK, PartitionSpec())
    per_chunk = jnp.einsum("tvp,tp...->vp...", of_round_TVP.astype(whole_TPK.dtype), whole_TPK)
    return jnp.reshape(per_chunk, (-1, *whole_TPK.shape[3:]))[:repeats]
