"""Attention along `context` where each device gathers the keys and values of all: an all-gather
forward and another backward, and a reduce-scatter of their gradients.

With grouped heads keys are small beside queries; each device has room for those of the whole row.

Shapes: as in `lmlib.models.attend.context_parallel.split`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lmlib.models.attend.context_parallel.split import Split, device
from lmlib.models.attend.kernel import Options
from lmlib.models.attend.pairs import Group
from lmlib.models.attend.tiles import (
    Keys,
    Mixed,
    Saved,
    arriving,
    mixed_with,
    no_gradients,
    nothing_mixed,
    with_gradients,
)
from lmlib.parallel.collectives import all_gather, psum_scatter
from lmlib.parallel.layout import along


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    split: Split, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> Mixed:
    """See `lmlib.models.attend.context_parallel.attend`; heads come first."""
    return _forward(split, options, q_BKGSD, k_BKSD, v_BKSV, segments_BS)[0]


def _forward(
    split: Split, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> tuple[Mixed, Saved]:
    keys, groups = _gathered(split, options, k_BKSD, v_BKSV, segments_BS)
    queries = split.queries(q_BKGSD, segments_BS)
    sums = nothing_mixed(q_BKGSD, v_BKSV.shape[-1])
    sums = mixed_with(sums, queries, keys, groups, device(), options)
    mixed = sums.weighted(v_BKSV.dtype)
    return mixed, ((q_BKGSD, k_BKSD, v_BKSV, segments_BS), mixed)


def _backward(
    split: Split, options: Options, saved: Saved, given: Mixed
) -> tuple[Array, Array, Array, None]:
    (q_BKGSD, k_BKSD, v_BKSV, segments_BS), mixed = saved
    keys, groups = _gathered(split, options, k_BKSD, v_BKSV, segments_BS)
    dq_BKGSD, dk_BKTD, dv_BKTV = with_gradients(
        no_gradients(q_BKGSD, keys.k_BKTD, keys.v_BKTV),
        split.queries(q_BKGSD, segments_BS),
        keys,
        arriving(mixed, given),
        groups,
        device(),
        options,
    )
    dk_BKSD, dv_BKSV = (psum_scatter(x, along("seq"), axis=2) for x in (dk_BKTD, dv_BKTV))
    return (
        dq_BKGSD.astype(q_BKGSD.dtype),
        dk_BKSD.astype(k_BKSD.dtype),
        dv_BKSV.astype(v_BKSV.dtype),
        None,
    )


attend.defvjp(_forward, _backward)


def _gathered(
    split: Split, options: Options, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> tuple[Keys, list[Group]]:
    """The keys of the whole row, one device's after the other's, and the pairs with them."""
    k_BKTD, v_BKTV = (all_gather(x, along("seq"), axis=2) for x in (k_BKSD, v_BKSV))
    segments_BT = all_gather(segments_BS, along("seq"), axis=1)
    keys = Keys(k_BKTD, v_BKTV, segments_BT, jnp.asarray(split.places_CS.reshape(-1)))
    pieces_L = split.pieces_CM.reshape(-1)
    return keys, split.groups(np.tile(pieces_L, (split.devices, 1)), options)
