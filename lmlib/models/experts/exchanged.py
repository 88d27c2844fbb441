"""Dispatch by all-to-all: devices send rows to their experts and get results back.

In a round, a device sends up to Q rows to each other device; further rows wait for the next round.
On GPUs and TPUs only the rows are sent (a ragged all-to-all); other backends send whole buffers.

Shapes: n tokens of a device, K choices of a token, M = n · K pairs of a token and a choice, P
devices along `expert`, Q rows from one device to another in a round, C = P · Q, X experts of a
device.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from lmlib.models.experts.sorting import sorted_by, unsort, zero_padding
from lmlib.parallel.collectives import all_gather, axis_index, devices_along
from lmlib.parallel.exchange import exchange_rows, pmax_everywhere
from lmlib.parallel.mesh_axes import MeshAxes


class Exchanged:
    """A movement; see `lmlib.models.experts.rounds.Dispatch`."""

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
        search = jax.vmap(lambda ends_X: jnp.searchsorted(ends_X, places_Q, side="right"))
        experts_PQ = search(ends_PX)
        return sorted_by(jnp.ravel(experts_PQ).astype(jnp.int32), self.X)
