"""Attention along `context` where keys and values go round from device to device (Liu et al. 2023,
arXiv:2310.01889): each device mixes what is there with its own queries, so that none has more than
one other device's keys at a time.

The gradients of keys and values go round with them. Rounds in which no query sees a key, as there
are with a window, are left out.

Shapes: as in `lmlib.models.attend.context_parallel.split`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from lmlib.models.attend.context_parallel.split import Split, device
from lmlib.models.attend.kernel import Options
from lmlib.models.attend.pairs import Group
from lmlib.models.attend.tiles import (
    Gradients,
    Mixed,
    Saved,
    arriving,
    mixed_with,
    no_gradients,
    nothing_mixed,
    with_gradients,
)
from lmlib.parallel.collectives import passed_on
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
    queries = split.queries(q_BKGSD, segments_BS)
    sums, there, before = nothing_mixed(q_BKGSD, v_BKSV.shape[-1]), (k_BKSD, v_BKSV, segments_BS), 0
    for away, groups in _rounds(split, options):
        there, before = _passed_on(there, away - before), away
        keys = split.keys_of(_owner(split, away), *there)
        sums = mixed_with(sums, queries, keys, groups, device(), options)
    mixed = sums.weighted(v_BKSV.dtype)
    return mixed, ((q_BKGSD, k_BKSD, v_BKSV, segments_BS), mixed)


def _backward(
    split: Split, options: Options, saved: Saved, given: Mixed
) -> tuple[Array, Array, Array, None]:
    (q_BKGSD, k_BKSD, v_BKSV, segments_BS), mixed = saved
    queries, known = (
        split.queries(q_BKGSD, segments_BS),
        arriving(mixed, given),
    )
    dq, *dkv = no_gradients(q_BKGSD, k_BKSD, v_BKSV)
    there, before = (k_BKSD, v_BKSV, segments_BS), 0
    for away, groups in _rounds(split, options):
        there, dkv = _passed_on((there, dkv), away - before)
        before = away
        keys = split.keys_of(_owner(split, away), *there)
        dq, *dkv = with_gradients(
            Gradients(dq, *dkv), queries, keys, known, groups, device(), options
        )
    summed = dkv[0].astype(k_BKSD.dtype), dkv[1].astype(v_BKSV.dtype)
    dk_BKSD, dv_BKSV = _passed_on(summed, split.devices - before)  # home
    return dq.astype(q_BKGSD.dtype), dk_BKSD, dv_BKSV, None


attend.defvjp(_forward, _backward)


def _rounds(split: Split, options: Options) -> Iterator[tuple[int, list[Group]]]:
    """How many devices before this one those are whose keys are there, and the pairs with them."""
    for away in range(split.devices):
        groups = split.groups(np.roll(split.pieces_CM, away, axis=0), options)
        if groups:
            yield away, groups


def _owner(split: Split, away: int) -> Array | int:
    return (device() - away) % split.devices


def _passed_on(tree: Any, devices: int) -> Any:
    """What each device has, on the one so many further on."""
    return jax.tree.map(lambda x: passed_on(x, along("seq"), devices), tree)
