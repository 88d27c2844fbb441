"""Dispatch by all-gather: devices gather all tokens, and reduce-scatter the results.

Each device picks the rows for its own experts, and sums their outputs for each token. With one
device along `expert`, nothing is sent.

Shapes: n tokens of a device, N tokens of all devices along `expert`, K choices of a token, M = N ·
K pairs of a token and a choice, C rows of a round, X experts of a device.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from lmlib.models.experts.sorting import sorted_by, unsort, zero_padding
from lmlib.parallel.collectives import all_gather, axis_index, devices_along, psum_scatter
from lmlib.parallel.mesh_axes import MeshAxes


class Gathered:
    """A movement; see `lmlib.models.experts.rounds.Dispatch`."""

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
