"""Moves rows to the devices of their experts and back, by all-gather or by all-to-all.

Shapes: n tokens of a device, N tokens of all devices along `expert`, K choices of a token, M pairs
of a token and a choice, P devices along `expert`, Q rows from one device to another in a round, C
rows of a round, X experts of a device, E embed.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from lmlib.models.experts import triton_grouped
from lmlib.parallel.collectives import all_gather, axis_index, devices_along, platform, psum_scatter
from lmlib.parallel.exchange import exchange_rows, pmax_everywhere
from lmlib.parallel.mesh_axes import MeshAxes


def sorted_by(
    experts_M: Int32[Array, "m"], experts: int
) -> tuple[Int32[Array, "m"], Int32[Array, "m"], Int32[Array, "x"]]:
    """Sorts pairs by their expert, stably: the order, each pair's place in it, and experts' counts.

    Experts beyond the last one come last and are not counted.
    """
    M = len(experts_M)
    order_M = jnp.argsort(experts_M, stable=True).astype(jnp.int32)
    places_M = (
        jnp.zeros(M, jnp.int32).at[order_M].set(jnp.arange(M, dtype=jnp.int32), unique_indices=True)
    )
    sizes_X = jnp.sum(experts_M[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    return order_M, places_M, sizes_X


def zero_padding(rows_C: Array, is_row_C: Bool[Array, "c"]) -> Array:
    """Replaces padding rows by zeros."""
    mask_C = jnp.reshape(is_row_C, (-1, *(1,) * (rows_C.ndim - 1)))
    return jnp.where(mask_C, rows_C, 0)


def unsort(
    rows_C: Array, places_nK: Int[Array, "n k"], computed_nK: Bool[Array, "n k"], of_pairs: bool
) -> Array:
    """Sums each token's rows in float32 or wider, [n, E]; or places values of pairs, [n, K].

    `places_nK` are the indices of the tokens' rows. Pairs that are not computed count as zero.
    """
    if of_pairs:
        return jnp.where(computed_nK, jnp.take(rows_C, places_nK, mode="clip"), 0)
    if platform() == "cuda" and triton_grouped.is_supported(rows_C, rows_C):
        return triton_grouped.sums_of_rows(rows_C, jnp.where(computed_nK, places_nK, -1))
    n, K = places_nK.shape
    x_nE = jnp.zeros((n, rows_C.shape[1]), jnp.promote_types(rows_C.dtype, jnp.float32))
    for k in range(K):
        row_nE = jnp.take(rows_C, places_nK[:, k], axis=0, mode="clip")
        x_nE += zero_padding(row_nE, computed_nK[:, k])
    return x_nE


class Gathered:
    """Dispatch by all-gather: devices gather all tokens, and reduce-scatter the results.

    Each device picks the rows for its own experts, and sums their outputs for each token. With one
    device along `expert`, nothing is sent. M = N · K.
    """

    def __init__(self, choices_nK: Int32[Array, "n k"], experts: int, room: float, along: MeshAxes):
        self.along = along
        devices = devices_along(along)
        n, self.K = choices_nK.shape
        X = experts // devices
        own_NK = all_gather(choices_nK, along, axis=0) - axis_index(along) * X
        own_M = jnp.ravel(jnp.where((own_NK >= 0) & (own_NK < X), own_NK, X))
        self.pairs_M, places_M, sizes_X = sorted_by(own_M, X)
        self.places_NK = jnp.reshape(places_M, own_NK.shape)
        self.ends_X = jnp.cumsum(sizes_X)
        # Even routing gives n · K pairs to each device.
        even = n * self.K
        self.C = even if devices == 1 else min(math.ceil(room * even), own_M.size)
        self.rounds: Array | int = 1 if devices == 1 else -(-self.ends_X[-1] // self.C)

    def sent(self, x_n: Array) -> Array:
        return all_gather(x_n, self.along, axis=0)

    def sizes(self, round: Array | int) -> Int32[Array, "x"]:
        ends_X = jnp.clip(self.ends_X - round * self.C, 0, self.C)
        return jnp.diff(ends_X, prepend=0)

    def rows(self, sent_N: Array, round: Array | int, of_pairs: bool = False) -> Array:
        places_C = round * self.C + jnp.arange(self.C, dtype=jnp.int32)
        pairs_C = jnp.take(self.pairs_M, places_C, mode="clip")
        rows_C = jnp.ravel(sent_N)[pairs_C] if of_pairs else sent_N[pairs_C // self.K]
        return zero_padding(rows_C, places_C < self.ends_X[-1])

    def back(self, rows_C: Array, round: Array | int, of_pairs: bool = False) -> Array:
        places_NK = self.places_NK - round * self.C
        return unsort(rows_C, places_NK, self.computed(round), of_pairs)

    def computed(self, round: Array | int) -> Bool[Array, "n k"]:
        first = round * self.C
        end = jnp.minimum(first + self.C, self.ends_X[-1])
        return (self.places_NK >= first) & (self.places_NK < end)

    def combine(self, x_N: Array) -> Array:
        return psum_scatter(x_N, self.along, axis=0)


class Exchanged:
    """Dispatch by all-to-all: devices send rows to their experts and get results back.

    In a round, a device sends up to Q rows to each other device; further rows wait for the next
    round. On GPUs and TPUs only the rows are sent (a ragged all-to-all); other backends send whole
    buffers. M = n · K, C = P · Q.
    """

    def __init__(self, choices_nK: Int32[Array, "n k"], experts: int, room: float, along: MeshAxes):
        self.along, self.P = along, devices_along(along)
        n, self.K = choices_nK.shape
        self.X = experts // self.P
        self.Q = min(math.ceil(room * n * self.K / self.P), n * min(self.K, self.X))
        choices_M = jnp.ravel(choices_nK)
        self.pairs_M, places_M, sizes = sorted_by(choices_M, experts)
        sizes_PX = jnp.reshape(sizes, (self.P, self.X))
        self.given_P = jnp.sum(sizes_PX, axis=1)  # rows that this device sends to each other device
        starts_P = jnp.cumsum(self.given_P) - self.given_P
        self.starts_P = starts_P
        self.devices_nK = choices_nK // self.X
        self.places_nK = jnp.reshape(places_M, (n, self.K)) - starts_P[self.devices_nK]
        # For each of this device's experts: the number of rows that each device has for it.
        everyones_PPX = jnp.reshape(all_gather(sizes_PX, along, axis=0), (self.P, self.P, self.X))
        self.for_me_PX = jnp.take(everyones_PPX, axis_index(along), axis=1)
        self.taken_P = jnp.sum(self.for_me_PX, axis=1)
        # All devices take part in every round, so all run as many rounds as any of them needs.
        self.rounds = pmax_everywhere(-(-jnp.max(self.given_P) // self.Q))

    def sent(self, x_n: Array) -> Array:
        return x_n

    def sizes(self, round: Array | int) -> Int32[Array, "x"]:
        return self._sorted(round)[2]

    def rows(self, sent_n: Array, round: Array | int, of_pairs: bool = False) -> Array:
        places_PQ = round * self.Q + jnp.arange(self.Q, dtype=jnp.int32)
        is_row_PQ = places_PQ < self.given_P[:, None]
        pairs_PQ = jnp.take(self.pairs_M, self.starts_P[:, None] + places_PQ, mode="clip")
        values = jnp.ravel(sent_n)[pairs_PQ] if of_pairs else sent_n[pairs_PQ // self.K]
        values = jnp.reshape(values, (self.P * self.Q, *values.shape[2:]))
        values_C = zero_padding(values, is_row_PQ.ravel())
        given_P, taken_P = self._counts(round)
        arrived_C = exchange_rows(values_C, given_P, taken_P, self.along)
        order_C, _, sizes_X = self._sorted(round)
        is_row_C = jnp.arange(len(order_C)) < jnp.sum(sizes_X)
        return zero_padding(arrived_C[order_C], is_row_C)

    def back(self, rows_C: Array, round: Array | int, of_pairs: bool = False) -> Array:
        _, places_C, _ = self._sorted(round)
        given_P, taken_P = self._counts(round)
        values_C = exchange_rows(rows_C[places_C], taken_P, given_P, self.along)
        places_nK = self.devices_nK * self.Q + self.places_nK - round * self.Q
        return unsort(values_C, places_nK, self.computed(round), of_pairs)

    def computed(self, round: Array | int) -> Bool[Array, "n k"]:
        first = round * self.Q
        return (self.places_nK >= first) & (self.places_nK < first + self.Q)

    def combine(self, x_n: Array) -> Array:
        return x_n

    def _counts(self, round: Array | int) -> list[Array]:
        first = round * self.Q
        return [jnp.clip(each_P - first, 0, self.Q) for each_P in (self.given_P, self.taken_P)]

    def _sorted(self, round: Array | int) -> tuple[Array, Array, Array]:
        """Applies `sorted_by` to the rows that arrive in a round."""
        places_Q = round * self.Q + jnp.arange(self.Q, dtype=jnp.int32)
        ends_PX = jnp.cumsum(self.for_me_PX, axis=1)
        # Places beyond a device's last row get the index after the last expert.
        experts_PQ = jnp.sum(ends_PX[:, None] <= places_Q[:, None], axis=-1, dtype=jnp.int32)
        return sorted_by(jnp.ravel(experts_PQ), self.X)


# A movement of rows to the devices of their experts and back, on one device, in `rounds` (an `int`
# if always 1). `sent` prepares an array of tokens or pairs for `rows`, which returns a round's rows
# for this device's experts, sorted by expert and zero-padded: [C, E], or [C] for pairs of a token
# and a choice. `sizes` are the rows of each expert. `back`, the transpose of `rows`, sums the rows
# of each token, and `combine` returns the sums to the devices of their tokens. `computed` is True
# for each pair that a round computes.
Dispatch = Gathered | Exchanged
DISPATCHES: dict[str, Callable[..., Any]] = {"gather": Gathered, "exchange": Exchanged}
