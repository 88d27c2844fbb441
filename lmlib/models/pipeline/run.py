"""Layers in stages, one beside the other: pipeline parallelism within one program.

Each device along `stage` keeps and computes layers of its own. In a slot of the schedule all stages
compute at once, each for another microbatch, and what they make moves on by one stage (a ppermute).
Backward JAX reverses the loop over slots: gradients move from the last stage to the first.

Shapes: W rows of a microbatch, S sequence, E embed, P stages, G groups, M microbatches, T slots,
R repetitions of a pattern, K repetitions of a chunk, V rounds.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32, Key

from lmlib.models.context import Context
from lmlib.models.pipeline.chunks import in_chunks
from lmlib.models.pipeline.microbatches import (
    brought,
    everywhere,
    moved_up,
    next_of,
    put_back,
    taken_home,
    to_next_stage,
)
from lmlib.models.pipeline.schedule import Schedule, Work, schedule_of
from lmlib.models.scan import Given, Repeated, counted, run
from lmlib.parallel.collectives import on_each_device
from lmlib.parallel.layout import partition
from lmlib.parallel.stages import each_stage

_OF_TOKENS = ("positions_BS", "segment_ids_BS", "counts_BS")


def run_in_stages(
    context: Context,
    computed: Callable[[Context], dict[Hashable, Any]],
    x_BSE: Float[Array, "b s embed"],
    repeated: Repeated,
    repeats: int,
    names: Sequence[str],
) -> tuple[Float[Array, "b s embed"], tuple[Given, ...]]:
    """As `lmlib.models.scan.run`, of at least as many repetitions as there are stages; without
    caches, and nothing is observed.

    Args:
      context: its shared values are integers, of which every stage keeps all rows, or activations,
        which travel from stage to stage beside the residual stream.
      computed: computes the shared values that follow from a context alone.
    """
    residual = context.compute.residual
    schedule = schedule_of(len(x_BSE), context.compute, jax.sharding.get_abstract_mesh())
    chunks = in_chunks(repeated, repeats, schedule)
    of_tokens = {
        name: everywhere(x_BS, schedule.groups)
        for name in _OF_TOKENS
        if (x_BS := getattr(context, name)) is not None
    }

    activations, integers = _parted(context.shared)
    integers = jax.tree.map(lambda x_BS: everywhere(x_BS, schedule.groups), integers)

    def stage(entering: Any, at: Any, chunks: Repeated, work: Work) -> tuple[Any, Any]:
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
        keys = jax.tree.map(lambda key_K: _folded(key_K, work.microbatch), keys)
        chunk = chunks._replace(keys=keys, counts=counts)
        length = jax.tree.leaves(chunk.layers)[0].shape[0]
        with jax.named_scope("layers"):
            y_WSE, given = run(own, x_WSE, chunk, length, names, of_round(work.round))
        return (y_WSE, moved), tuple(counted(each.reports, work.counts) for each in given)

    def of_round(round: Array) -> Callable[[Any], Any]:
        return lambda layer_V: jax.tree.map(lambda w_V: _at(w_V, round), layer_V)

    def slot(carry: Any, moment: _Moment) -> tuple[Any, Any]:
        waiting, at = carry
        entering = jax.tree.map(lambda each: next_of(each, moment.begins), waiting)
        waiting = jax.tree.map(lambda each: moved_up(each, moment.begins, residual), waiting)
        made, reports = each_stage(stage)(entering, at, chunks, moment.work)
        x_waiting = put_back(waiting[0], made[0], moment.ends, moment.work.ends, residual)
        made = jax.tree.map(lambda each: to_next_stage(each, residual), made)
        return ((x_waiting, waiting[1]), made), reports

    waiting = jax.tree.map(
        lambda each: brought(each, schedule.groups, residual), (x_BSE, activations)
    )
    # Until a stage gets its first microbatch it computes one that waits there: it does not count.
    at = jax.tree.map(lambda each: next_of(each, jnp.int32(0)), waiting)
    with jax.named_scope("slots"):
        (waiting, _), reports_TPK = jax.lax.scan(slot, (waiting, at), _moments(schedule))
    reports = jax.tree.map(lambda each: _by_layer(each, schedule, repeats), reports_TPK)
    return taken_home(waiting[0], residual), tuple(Given(each, None, None) for each in reports)


def _parted(shared: Mapping[Hashable, Any]) -> tuple[dict[Hashable, Any], dict[Hashable, Any]]:
    """Shared values that are activations, laid out as the residual stream, and the integers."""
    parts: tuple[dict[Hashable, Any], dict[Hashable, Any]] = {}, {}
    for key, value in shared.items():
        kinds = {jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in jax.tree.leaves(value)}
        parts[kinds == {True}][key] = value
    return parts


class _Moment(NamedTuple):
    """A slot: what each stage does in it, and `Schedule.begins` and `Schedule.ends` of it."""

    work: Work
    begins: Int32[Array, "*t"]
    ends: Int32[Array, "*t"]


def _moments(schedule: Schedule) -> _Moment:
    def laid_out(x_TP: np.ndarray) -> Array:
        return jax.sharding.reshard(_array(x_TP), partition((None, "stage")))

    work = jax.tree.map(laid_out, schedule.work())
    return _Moment(work, _array(schedule.begins()), _array(schedule.ends()))


def _array(x: np.ndarray) -> Array:
    return jnp.asarray(x, x.dtype if x.dtype == bool else jnp.int32)


def _at(x: Array, index: Int32[Array, ""]) -> Array:
    """`x[index]` of an axis that is whole."""
    places = jax.typeof(x).sharding.spec.partitions
    taken = on_each_device(
        lambda x, index: jax.lax.dynamic_index_in_dim(x, index, keepdims=False),
        (PartitionSpec(*places), PartitionSpec()),
        PartitionSpec(*places[1:]),
    )
    return taken(x, index)


def _folded(key_K: Key[Array, "k"], number: Int32[Array, ""]) -> Key[Array, "k"]:
    return jax.vmap(jax.random.fold_in, (0, None))(key_K, number)


def _by_layer(reported_TPK: Array, schedule: Schedule, repeats: int) -> Array:
    """Sums over the slots of what each layer's chunk reported in them, (R, …)."""
    round_T1P = schedule.work().round[:, None]
    of_round_TVP = round_T1P == np.arange(schedule.rounds)[:, None]
    whole_TPK = jax.sharding.reshard(reported_TPK, PartitionSpec())
    per_chunk = jnp.einsum("tvp,tp...->vp...", of_round_TVP.astype(whole_TPK.dtype), whole_TPK)
    return jnp.reshape(per_chunk, (-1, *whole_TPK.shape[3:]))[:repeats]
