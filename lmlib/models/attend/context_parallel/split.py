"""Attention of rows that are split over `context`: what its two ways have in common.

Shapes: C devices, M pieces of each, L pieces of keys, B batch, S sequence of a device, K kv_heads,
G query heads to each key-value head, D head_dim of queries and keys, V that of values.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from lmlib.models.attend.blockwise import best_tile
from lmlib.models.attend.kernel import Options, Places
from lmlib.models.attend.pairs import Group, grouped_pairs, largest_tile
from lmlib.models.attend.tiles import Keys, Queries
from lmlib.parallel.collectives import axis_index, devices_along
from lmlib.parallel.layout import along
from lmlib.row_order import pieces_of_devices, places


class Split(NamedTuple):
    """How a row lies along the devices of `context`.

    Attributes:
      order: see `lmlib.row_order`.
      length: tokens of a device.
      devices: how many there are along `context`.
      tile: tokens of one.
    """

    order: str
    length: int
    devices: int
    tile: int

    @classmethod
    def of(cls, order: str, length: int) -> "Split":
        """On the mesh that is set, for rows of which a device has `length` tokens."""
        split = cls(order, length, devices_along(along("seq")), 0)
        return split._replace(tile=largest_tile(split.piece, best_tile()))

    @property
    def piece(self) -> int:
        """Tokens of one, which stand in order."""
        return self.length // self.pieces_CM.shape[1]

    @property
    def pieces_CM(self) -> Int[np.ndarray, "c m"]:
        """Which pieces each device has."""
        return pieces_of_devices(self.devices, self.order)

    @property
    def query_places(self) -> Places:
        """The places of this device's queries."""
        return Places(self.places_CS, device(), self.piece)

    @property
    def places_CS(self) -> Int[np.ndarray, "c s"]:
        """Where in its row each token of each device stands."""
        whole_S = places(self.length * self.devices, self.devices, self.order)
        return whole_S.reshape(self.devices, -1).astype(np.int32)

    def groups(self, keys_CL: Int[np.ndarray, "c l"], options: Options) -> list[Group]:
        """Pairs of each device's pieces and the pieces of keys that it has then."""
        return grouped_pairs(self.pieces_CM, keys_CL, self.piece, self.tile, options.window)

    def in_row_order(self, gathered_BT: Array) -> Array:
        """What was gathered along the axis 1, one device's after the other's."""
        if self.order == "plain":
            return gathered_BT
        B, T, *others = gathered_BT.shape
        pieces_BCML = gathered_BT.reshape(B, self.devices, -1, self.piece, *others)
        early, late = pieces_BCML[:, :, 0], pieces_BCML[:, ::-1, 1]
        return jnp.concatenate([early, late], axis=1).reshape(B, T, *others)

    def queries(self, q_BKGSD: Array, segments_BS: Array) -> Queries:
        """Those of this device."""
        return Queries(q_BKGSD, segments_BS, jnp.asarray(self.places_CS)[device()])

    def keys_of(self, owner: Array | int, k_BKSD: Array, v_BKSV: Array, segments_BS: Array) -> Keys:
        """Those that are at rest on the device `owner`."""
        return Keys(k_BKSD, v_BKSV, segments_BS, jnp.asarray(self.places_CS)[owner])


def device() -> Array | int:
    """Which of the devices along `context` this is."""
    return axis_index(along("seq"))
