"""Rows as microbatches: to the stages, from stage to stage, and back to the devices they came from.

Outside of the stages rows lie along `stage` as along `fsdp`. Each device brings some of its own to
each of `groups` microbatches; those of a group wait, one at each stage, and move on by one stage a
slot, so that the first stage takes one after the other (Xu et al. 2021, arXiv:2105.04663, §3.3).

Shapes: B batch, S sequence, E embed, P stages, G groups, M microbatches = groups × stages, W rows
of a microbatch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from lmlib.parallel.collectives import all_gather, on_each_device, passed_on
from lmlib.parallel.layout import along, partition
from lmlib.parallel.stages import each_stage


def brought(
    x_BSE: Float[Array, "b s embed"], groups: int, residual: str
) -> Float[Array, "p g w s embed"]:
    """The microbatches as they wait; nothing is sent. `residual` names the layout of x."""

    def local(x_BSE: Array) -> Array:
        return jnp.reshape(x_BSE, (1, groups, -1, *x_BSE.shape[1:]))

    return on_each_device(local, (partition(residual),), partition(_waiting(residual)))(x_BSE)


def taken_home(x_PGWSE: Float[Array, "p g w s embed"], residual: str) -> Float[Array, "b s embed"]:
    """The inverse of `brought`."""

    def local(x_PGWSE: Array) -> Array:
        return jnp.reshape(x_PGWSE, (-1, *x_PGWSE.shape[3:]))

    return on_each_device(local, (partition(_waiting(residual)),), partition(residual))(x_PGWSE)


def everywhere(x_BS: Array, groups: int) -> Array:
    """What each token has, (M, W, S) by microbatches, at all stages (an all-gather)."""

    def local(x_BS: Array) -> Array:
        x_GWS = jnp.reshape(x_BS, (groups, 1, -1, x_BS.shape[1]))
        x_GPWS = all_gather(x_GWS, along("stage"), 1)
        return jnp.reshape(x_GPWS, (-1, *x_GPWS.shape[2:]))

    return on_each_device(
        local, (partition("batch seq"),), partition((None, "stage_batch", "seq")), tracked=False
    )(x_BS)


def to_next_stage(x_PWSE: Array, residual: str) -> Array:
    """Each stage's microbatch at the next one, that of the last stage at the first (a ppermute)."""
    return _passed_on(x_PWSE, residual, 1)


def next_of(waiting_PGWSE: Array, group: Int32[Array, ""]) -> Array:
    """What waits of a group, (P, W, S, E); the first stage's is next."""
    return jax.lax.dynamic_index_in_dim(waiting_PGWSE, group, 1, keepdims=False)


def moved_up(waiting_PGWSE: Array, group: Int32[Array, ""], residual: str) -> Array:
    """What waits of a group one stage nearer to the first, that of the first at the last (a
    ppermute); nothing moves of group -1."""

    def moved(x_PGWSE: Array) -> Array:
        x_PWSE = _passed_on(next_of(x_PGWSE, group), residual, -1)
        return jax.lax.dynamic_update_index_in_dim(x_PGWSE, x_PWSE, group, 1)

    return jax.lax.cond(group >= 0, moved, lambda x_PGWSE: x_PGWSE, waiting_PGWSE)


def put_back(
    waiting_PGWSE: Array,
    x_PWSE: Array,
    group: Int32[Array, ""],
    ends_P: Bool[Array, "p"],
    residual: str,
) -> Array:
    """What waits of a group moved up (a ppermute), and what has ended in its place at the last
    stage; with group -1 all stays."""

    def put(x_PGWSE: Array) -> Array:
        there_PWSE = _passed_on(next_of(x_PGWSE, group), residual, -1)
        there_PWSE = each_stage(jnp.where)(ends_P, x_PWSE, there_PWSE)
        return jax.lax.dynamic_update_index_in_dim(x_PGWSE, there_PWSE, group, 1)

    return jax.lax.cond(group >= 0, put, lambda x_PGWSE: x_PGWSE, waiting_PGWSE)


def _passed_on(x_PWSE: Array, residual: str, stages: int) -> Array:
    layout = partition(("stage", *_in_stages(residual)))
    return on_each_device(lambda x: passed_on(x, along("stage"), stages), (layout,), layout)(x_PWSE)


def _in_stages(residual: str) -> tuple[str, ...]:
    return ("stage_batch", *residual.split()[1:])


def _waiting(residual: str) -> tuple[str | None, ...]:
    return ("stage", None, *_in_stages(residual))
