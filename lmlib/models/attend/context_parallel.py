"""Context parallelism: attention over rows that several devices share.

    way     keys and values
    gather  each device gathers all of them (`lmlib.models.attend.blockwise.gathered`)
    ring    they are passed around, one device's at a time

Both visit the tiles of `lmlib.models.attend.tiles`. With "gather" a fused kernel may replace them.

Shapes: C devices along `context`, P each device's part of T, B batch, S sequence of a device, T
sequence of the row, H heads, K kv_heads, G = H / K query heads per key-value head, D head_dim of
queries and keys, V head_dim of values.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.blockwise import Split, device, gathered, heads_first
from lmlib.models.attend.kernel import Kernel, Options, kernel_of
from lmlib.models.attend.tiles import (
    Gradients,
    Group,
    Keys,
    Mixed,
    Saved,
    arriving,
    mixed_with,
    no_gradients,
    nothing_mixed,
    with_gradients,
)
from lmlib.parallel.collectives import all_gather, devices_along, passed_on, psum_scatter
from lmlib.parallel.layout import along
from lmlib.row_order import pieces_of_devices

# Gathered keys and values may take this multiple of the memory of a device's queries.
_SMALL = 4


def problem(kernel: Kernel, way: str) -> str | None:
    """The reason why a fused kernel does not support split rows; `None` if it does."""
    if not kernel.takes_pieces:
        return "it computes whole rows only"
    return "it computes rows whose keys are gathered, not context='ring'" if way == "ring" else None


def length_of_piece(length: int, devices: int, order: str) -> int:
    """The minimum number of a row's tokens that are adjacent on one of its devices."""
    return length // pieces_of_devices(devices, order).size


def function_of(
    implementation: str, heads: int, kv_heads: int, order: str, way: str
) -> Callable[..., Any]:
    """Returns the function `(q_BSHD, k_BSKD, v_BSKV, segments_BS, options)` for one device.

    "auto" gathers keys if they are small compared with the queries, else passes them around.
    """
    if implementation != "blockwise":
        return functools.partial(_fused, kernel=kernel_of(implementation), order=order)
    if way == "auto":
        small = devices_along(along("seq")) * kv_heads <= _SMALL * heads
        way = "gather" if small else "ring"

    def attend(q_BSHD: Array, *others: Array, options: Options) -> tuple[Array, Array]:
        split = Split.of(order, q_BSHD.shape[1])
        return heads_first(
            {"gather": gathered, "ring": _ring}[way], split, options, q_BSHD, *others
        )

    return attend


def _fused(
    q_BSHD: Float[Array, "b s h d"],
    k_BSKD: Float[Array, "b s k d"],
    v_BSKV: Float[Array, "b s k v"],
    segments_BS: Int32[Array, "b s"],
    options: Options,
    kernel: Kernel,
    order: str,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b s h"] | None]:
    """The kernel's result for this device's queries and the keys of the whole row, in its order."""
    split = Split.of(order, q_BSHD.shape[1])
    k_BTKD, v_BTKV = (split.in_row_order(_all_of(x)) for x in (k_BSKD, v_BSKV))
    segments_BT = split.in_row_order(all_gather(segments_BS, along("seq"), axis=1))
    return kernel.attend(
        q_BSHD, k_BTKD, v_BTKV, segments_BS, segments_BT, split.query_places, options
    )


@jax.custom_vjp
def _all_of(x_BP: Array) -> Array:
    return all_gather(x_BP, along("seq"), axis=1)


def _all_of_backward(_: None, d_BT: Array) -> tuple[Array]:
    """Sums over devices in float32 or wider."""
    wide = jnp.promote_types(d_BT.dtype, jnp.float32)
    return (psum_scatter(d_BT.astype(wide), along("seq"), axis=1).astype(d_BT.dtype),)


_all_of.defvjp(lambda x_BP: (_all_of(x_BP), None), _all_of_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    split: Split, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> Mixed:
    """Ring attention: keys and values go from device to device (Liu et al. 2023, arXiv:2310.01889).

    The gradients of keys and values travel with them. Rounds in which no query attends to a key,
    which a window causes, are skipped.
    """
    return _forward(split, options, q_BKGSD, k_BKSD, v_BKSV, segments_BS)[0]


def _forward(
    split: Split, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> tuple[Mixed, Saved]:
    queries = split.queries(q_BKGSD, segments_BS)
    sums, there, before = nothing_mixed(q_BKGSD, v_BKSV.shape[-1]), (k_BKSD, v_BKSV, segments_BS), 0
    for away, groups in _rounds(split, options):
        there, before = _passed_on(there, away - before), away
        keys = _keys_there(split, away, *there)
        sums = mixed_with(sums, queries, keys, groups, device(), options)
    mixed = sums.weighted(v_BKSV.dtype)
    return mixed, ((q_BKGSD, k_BKSD, v_BKSV, segments_BS), mixed)


def _backward(
    split: Split, options: Options, saved: Saved, given: Mixed
) -> tuple[Array, Array, Array, None]:
    (q_BKGSD, k_BKSD, v_BKSV, segments_BS), mixed = saved
    queries, known = split.queries(q_BKGSD, segments_BS), arriving(mixed, given)
    dq, *dkv = no_gradients(q_BKGSD, k_BKSD, v_BKSV)
    there, before = (k_BKSD, v_BKSV, segments_BS), 0
    for away, groups in _rounds(split, options):
        there, dkv = _passed_on((there, dkv), away - before)
        before = away
        keys = _keys_there(split, away, *there)
        sums = Gradients(dq, *dkv)
        dq, *dkv = with_gradients(sums, queries, keys, known, groups, device(), options)
    summed = dkv[0].astype(k_BKSD.dtype), dkv[1].astype(v_BKSV.dtype)
    dk_BKSD, dv_BKSV = _passed_on(summed, split.devices - before)  # back to their own device
    return dq.astype(q_BKGSD.dtype), dk_BKSD, dv_BKSV, None


_ring.defvjp(_forward, _backward)


def _rounds(split: Split, options: Options) -> Iterator[tuple[int, list[Group]]]:
    """The distance to the device whose keys are used in each round, and the pairs with them."""
    for away in range(split.devices):
        groups = split.groups(np.roll(split.pieces_CM, away, axis=0), options)
        if groups:
            yield away, groups


def _keys_there(split: Split, away: int, k_BKSD: Array, v_BKSV: Array, segments_BS: Array) -> Keys:
    """The keys that belong to the device `away` places before this one."""
    owner = (device() - away) % split.devices
    return Keys(k_BKSD, v_BKSV, segments_BS, split.places_of(owner))


def _passed_on(tree: Any, devices: int) -> Any:
    """Sends the arrays of each device `devices` places further."""
    return jax.tree.map(lambda x: passed_on(x, along("seq"), devices), tree)
