"""The pairs of tiles that splash attention computes, against the mask of all pairs of tokens."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lmlib.models.attend.blockwise import Split
from lmlib.models.attend.fused.splash import Visible, visited

T, TILE = 128, 8


def pairs(info, device):
    """Of a list of tiles for each column: (tile, column) of those that are computed."""
    tiles, computed = info.data_next[device, 0], info.block_mask[device, 0]
    return {(int(tiles[i, j]), j) for i, j in zip(*np.nonzero(computed), strict=True)}


@pytest.mark.parametrize(
    ("order", "devices", "window"),
    itertools.product(["plain", "zigzag"], [1, 2, 4], [None, 1, 5, 8, 9, 40, 1_000]),
)
def test_they_are_those_in_which_a_query_sees_a_key(order, devices, window):
    places_CS = Split(order, T // devices, devices, 0).places_CS
    to_keys, to_queries = visited(places_CS, T, TILE, window)
    assert np.array_equal(to_keys.q_sequence, places_CS)
    for device, places_S in enumerate(places_CS):
        visible_ST = np.asarray(
            Visible(window)(jnp.asarray(places_S)[:, None], jnp.arange(T)[None])
        )
        distance_ST = places_S[:, None] - np.arange(T)
        assert np.array_equal(visible_ST, (distance_ST >= 0) & (distance_ST < (window or T)))
        visible_NM = visible_ST.reshape(-1, TILE, T // TILE, TILE).any(axis=(1, 3))
        expected = {(int(n), int(m)) for n, m in zip(*np.nonzero(visible_NM), strict=True)}
        of_queries = to_keys._replace(
            data_next=to_keys.data_next.swapaxes(2, 3), block_mask=to_keys.block_mask.swapaxes(2, 3)
        )
        assert {(n, m) for m, n in pairs(of_queries, device)} == expected
        assert pairs(to_queries, device) == expected
        # What is fetched but not computed is there.
        for info in (to_keys, to_queries):
            assert info.data_next.min() >= 0 and info.data_next.max() < T // TILE
