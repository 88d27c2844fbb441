"""Attention tile by tile in plain JAX (FlashAttention-2: Dao 2023, arXiv:2307.08691).

A scan visits the pairs of query tiles and key tiles that causality and the window allow. The
backward pass recomputes the weights of a tile. Memory grows with S, not with S × S.

Devices along `context` that share a row gather all keys and values: an all-gather in the forward
pass, another in the backward pass, and a reduce-scatter of their gradients.

Shapes: C devices along `context`, M pieces per device, L pieces of keys, B batch, S sequence of a
device (queries), T keys, H heads, K kv_heads, G = H / K query heads per key-value head, D head_dim
of queries and keys, V head_dim of values.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from lmlib.models.attend.kernel import Kernel, Options, Places
from lmlib.models.attend.tiles import (
    Gradients,
    Group,
    Keys,
    Mixed,
    Queries,
    Saved,
    arriving,
    grouped_pairs,
    largest_tile,
    mixed_with,
    no_gradients,
    nothing_mixed,
    with_gradients,
)
from lmlib.parallel.collectives import (
    all_gather,
    axis_index,
    devices_along,
    platform,
    psum_scatter,
)
from lmlib.parallel.exchange import ring_shift
from lmlib.parallel.layout import mesh_axes_for
from lmlib.row_order import pieces_of_devices, places

_PADDING = -1  # the segment of positions that pad the last tile


def attend(
    q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, segments_BS: Any, segments_BT: Any,
    places: Places, options: Options,
) -> tuple[Array, Array]:  # fmt: skip
    """See `lmlib.models.attend.kernel.Kernel`; supports only whole rows."""
    S = q_BSHD.shape[1]
    tile = min(S, best_tile())
    tail = -S % tile
    q, k, v = (jnp.pad(x, ((0, 0), (0, tail), (0, 0), (0, 0))) for x in (q_BSHD, k_BTKD, v_BTKV))
    segments_BS = jnp.pad(segments_BS, ((0, 0), (0, tail)), constant_values=_PADDING)
    whole = Split("plain", S + tail, 1, tile)
    mixed_BSHV, log_normaliser_BSH = heads_first(whole, options, q, k, v, segments_BS)
    return mixed_BSHV[:, :S], log_normaliser_BSH[:, :S]


def best_tile() -> int:
    """Tokens per tile: small enough for the cache of a CPU core, larger elsewhere for few steps."""
    return 128 if platform() == "cpu" else 512


class Split(NamedTuple):
    """The split of a row over the devices along `context`, with `length` tokens on each."""

    order: str
    length: int
    devices: int
    tile: int
    ring: bool = False

    @classmethod
    def of(cls, order: str, length: int, ring: bool = False) -> "Split":
        """The split of rows with `length` tokens per device on the current mesh."""
        split = cls(order, length, devices_along(mesh_axes_for("seq")), 0, ring)
        return split._replace(tile=largest_tile(split.piece, best_tile()))

    @property
    def piece(self) -> int:
        """Tokens per piece, which are adjacent in the row."""
        return self.length // self.pieces_CM.shape[1]

    @property
    def pieces_CM(self) -> Int[np.ndarray, "c m"]:
        """The pieces of each device."""
        return pieces_of_devices(self.devices, self.order)

    @property
    def places_CS(self) -> Int[np.ndarray, "c s"]:
        """The position in its row of each token of each device."""
        whole_S = places(self.length * self.devices, self.devices, self.order)
        return whole_S.reshape(self.devices, -1).astype(np.int32)

    @property
    def query_places(self) -> Places:
        """The positions of this device's queries."""
        return Places(self.places_CS, device(), self.piece)

    def places_of(self, owner: Array | int) -> Int[Array, "s"]:
        """The positions of a device's tokens."""
        if self.devices == 1:
            return jnp.arange(self.length, dtype=jnp.int32)
        return jnp.asarray(self.places_CS)[owner]

    def queries(self, q_BKGSD: Array, segments_BS: Array) -> Queries:
        """The queries of this device."""
        return Queries(q_BKGSD, segments_BS, self.places_of(device()))

    def in_row_order(self, gathered_BT: Array) -> Array:
        """Reorders an array gathered along axis 1, device by device, to the row's order."""
        if self.order == "plain":
            return gathered_BT
        B, T, *others = gathered_BT.shape
        pieces_BCML = gathered_BT.reshape(B, self.devices, -1, self.piece, *others)
        early, late = pieces_BCML[:, :, 0], pieces_BCML[:, ::-1, 1]
        return jnp.concatenate([early, late], axis=1).reshape(B, T, *others)


def device() -> Array | int:
    """The index of this device along `context`."""
    return axis_index(mesh_axes_for("seq"))


def heads_first(split: Split, options: Options, *arrays: Array) -> tuple[Array, Array]:
    """`tiled` for arrays whose heads come after the sequence."""
    q_BSHD, k_BSKD, v_BSKV, segments_BS = arrays
    B, S, H, D = q_BSHD.shape
    k_BKSD, v_BKSV = k_BSKD.swapaxes(1, 2), v_BSKV.swapaxes(1, 2)
    q_BKGSD = q_BSHD.swapaxes(1, 2).reshape(B, k_BKSD.shape[1], -1, S, D)
    mixed_BKGSV, log_normaliser_BKGS = tiled(split, options, q_BKGSD, k_BKSD, v_BKSV, segments_BS)
    mixed_BHSV = mixed_BKGSV.reshape(B, H, S, -1)
    return mixed_BHSV.swapaxes(1, 2), log_normaliser_BKGS.reshape(B, H, S).swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tiled(
    split: Split, options: Options, q_BKGSD: Array, k_BKSD: Array, v_BKSV: Array, segments_BS: Array
) -> Mixed:
    """Attention of this device's queries over the keys of the whole row.

    It gathers the keys, which are small if heads are grouped, or passes them around in a ring (Liu
    et al. 2023, arXiv:2310.01889), and the gradients of keys and values with them. The ring skips
    rounds in which no query attends to a key, which a window causes.
    """
    return _forward(split, options, q_BKGSD, k_BKSD, v_BKSV, segments_BS)[0]


def _forward(split: Split, options: Options, *arrays: Array) -> tuple[Mixed, Saved]:
    q_BKGSD, k_BKSD, v_BKSV, segments_BS = arrays
    there, before = _gathered(split, k_BKSD, v_BKSV, segments_BS), 0
    queries, sums = split.queries(q_BKGSD, segments_BS), nothing_mixed(q_BKGSD, v_BKSV.shape[-1])
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
    there, before = _gathered(split, k_BKSD, v_BKSV, segments_BS), 0
    dq, *dkv = no_gradients(q_BKGSD, *there[:2])
    queries, known = split.queries(q_BKGSD, segments_BS), arriving(mixed, given)
    for away, groups in _rounds(split, options):
        there, dkv = _passed_on((there, dkv), away - before)
        before = away
        keys, sums = _keys_there(split, away, *there), Gradients(dq, *dkv)
        dq, *dkv = with_gradients(sums, queries, keys, known, groups, device(), options)
    if not split.ring:
        dkv = [psum_scatter(x, mesh_axes_for("seq"), axis=2) for x in dkv]
    dk, dv = dkv[0].astype(k_BKSD.dtype), dkv[1].astype(v_BKSV.dtype)
    if split.ring:
        dk, dv = _passed_on((dk, dv), split.devices - before)  # back to their own device
    return dq.astype(q_BKGSD.dtype), dk, dv, None


tiled.defvjp(_forward, _backward)


def _gathered(split: Split, *arrays: Array) -> tuple[Array, ...]:
    """Keys, values and segments of the whole row, device by device, unless they go around."""
    if split.ring:
        return arrays
    axes = zip(arrays, (2, 2, 1), strict=True)
    return tuple(all_gather(x, mesh_axes_for("seq"), axis=axis) for x, axis in axes)


def _rounds(split: Split, options: Options) -> Iterator[tuple[int, list[Group]]]:
    """The distance to the device whose keys are used in each round, and the pairs with them."""
    for away in range(split.devices if split.ring else 1):
        pieces_CL = np.roll(split.pieces_CM, away, axis=0)
        if not split.ring:
            pieces_CL = np.tile(split.pieces_CM.reshape(-1), (split.devices, 1))
        tile, window = split.tile, options.window
        if groups := grouped_pairs(split.pieces_CM, pieces_CL, split.piece, tile, window):
            yield away, groups


def _keys_there(split: Split, away: int, k: Array, v: Array, segments: Array) -> Keys:
    """The keys of the whole row, or of the device `away` places before this one."""
    if split.ring or split.devices == 1:
        return Keys(k, v, segments, split.places_of((device() - away) % split.devices))
    return Keys(k, v, segments, jnp.asarray(split.places_CS.reshape(-1)))


def _passed_on(tree: Any, devices: int) -> Any:
    """Sends the arrays of each device `devices` places further."""
    return jax.tree.map(lambda x: ring_shift(x, mesh_axes_for("seq"), devices), tree)


KERNEL = Kernel(attend)
