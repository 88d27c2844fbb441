"""Attention tile by tile in plain JAX (FlashAttention-2: Dao 2023, arXiv:2307.08691).

A scan visits the pairs of a tile of queries and a tile of keys that causality and the window leave.
The forward pass keeps its output and the logarithm of each query's normaliser; the backward pass
computes the weights of a tile again from those. Memory grows with S, not with S × S.

Shapes: B batch, S sequence, H heads, K kv_heads, G = H / K query heads to each key-value head,
D head_dim of queries and keys, V that of values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lmlib.models.attend.kernel import Kernel, Options, Places
from lmlib.models.attend.pairs import Group, grouped_pairs
from lmlib.models.attend.tiles import (
    Keys,
    Mixed,
    Queries,
    Saved,
    arriving,
    mixed_with,
    no_gradients,
    nothing_mixed,
    with_gradients,
)
from lmlib.parallel.collectives import platform

_PADDING = -1  # the segment of positions that fill up the last tile


def attend(
    q_BSHD: Float[Array, "b s h d"],
    k_BSKD: Float[Array, "b s k d"],
    v_BSKV: Float[Array, "b s k v"],
    segments_BS: Int32[Array, "b s"],
    segments_BT: Int32[Array, "b s"],
    places: Places,
    options: Options,
) -> tuple[Float[Array, "b s h v"], Float[Array, "b s h"]]:
    """See `lmlib.models.attend.kernel.Kernel`; of whole rows."""
    B, S, H, D = q_BSHD.shape
    tile = min(S, best_tile())
    tail = -S % tile

    def padded(x_BSHD: Array) -> Array:
        return jnp.pad(x_BSHD, ((0, 0), (0, tail), (0, 0), (0, 0))).swapaxes(1, 2)

    def whole(x_BKGS: Array) -> Array:
        x_BHS = x_BKGS.reshape(B, H, *x_BKGS.shape[3:])
        return x_BHS.swapaxes(1, 2)[:, :S]

    q_BKGSD = padded(q_BSHD).reshape(B, k_BSKD.shape[2], -1, S + tail, D)
    segments_BS = jnp.pad(segments_BS, ((0, 0), (0, tail)), constant_values=_PADDING)
    mixed_BKGSV, log_normaliser_BKGS = _attend(
        tile, options, q_BKGSD, padded(k_BSKD), padded(v_BSKV), segments_BS
    )
    return whole(mixed_BKGSV), whole(log_normaliser_BKGS)


def best_tile() -> int:
    """Tokens of a tile: what stays in a CPU core's cache; elsewhere, few large steps."""
    return 128 if platform() == "cpu" else 512


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    tile: int, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> tuple[Array, Array]:
    return _forward(tile, options, q_BKGSD, k_BKSD, v_BKSV, segments_BS)[0]


def _forward(
    tile: int, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> tuple[Mixed, Saved]:
    queries, keys = _sides(q_BKGSD, k_BKSD, v_BKSV, segments_BS)
    groups = _groups(q_BKGSD.shape[3], tile, options)
    sums = nothing_mixed(q_BKGSD, v_BKSV.shape[-1])
    sums = mixed_with(sums, queries, keys, groups, 0, options)
    mixed = sums.weighted(v_BKSV.dtype)
    return mixed, ((q_BKGSD, k_BKSD, v_BKSV, segments_BS), mixed)


def _backward(
    tile: int, options: Options, saved: Saved, given: Mixed
) -> tuple[Array, Array, Array, None]:
    (q_BKGSD, k_BKSD, v_BKSV, segments_BS), mixed = saved
    queries, keys = _sides(q_BKGSD, k_BKSD, v_BKSV, segments_BS)
    groups = _groups(q_BKGSD.shape[3], tile, options)
    sums = no_gradients(q_BKGSD, k_BKSD, v_BKSV)
    dq, dk, dv = with_gradients(sums, queries, keys, arriving(mixed, given), groups, 0, options)
    return dq.astype(q_BKGSD.dtype), dk.astype(k_BKSD.dtype), dv.astype(v_BKSV.dtype), None


_attend.defvjp(_forward, _backward)


def _sides(
    q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> tuple[Queries, Keys]:
    places_S = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    return Queries(q_BKGSD, segments_BS, places_S), Keys(k_BKSD, v_BKSV, segments_BS, places_S)


def _groups(length: int, tile: int, options: Options) -> list[Group]:
    """Those of a row that is one piece, on one device."""
    whole_CM = np.zeros((1, 1), np.int32)
    return grouped_pairs(whole_CM, whole_CM, length, tile, options.window)


KERNEL = Kernel(attend)
