"""Triton's kernel visits the right tiles, and compiles for all GPUs that `plan` knows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import absent, needs_gpu_compiler
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lmlib.models.attend import attend
from lmlib.models.attend.blockwise import Split
from lmlib.models.attend.fused.splash import Visible, visited
from lmlib.models.attend.fused.triton_kernels import launches_of
from lmlib.models.attend.fused.visits import Tiles, keys_visited, queries_visited, sight
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.flops import count_flops

T = 64  # tokens of a row


@st.composite
def rows(draw):
    """Segments of a row, a window, tiles, and the part of it that the first device has."""
    borders = draw(st.sets(st.integers(1, T - 1), max_size=6))
    segments_T = np.isin(np.arange(T), sorted(borders)).cumsum()
    window = draw(st.none() | st.integers(1, T))
    tiles = Tiles(draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 8])))
    order, devices = draw(st.sampled_from([("plain", 1), ("plain", 2), ("zigzag", 4)]))
    return segments_T.astype(np.int32), window, tiles, Split(order, T // devices, devices, 0)


@pytest.mark.landing
@given(rows())
def test_tiles_that_see_each_other_are_visited_and_others_seldom(row):
    segments_T, window, tiles, split = row
    places_S = split.places_CS[0]
    distance_ST = places_S[:, None] - np.arange(T)
    visible_ST = (distance_ST >= 0) & (segments_T[places_S][:, None] == segments_T)
    visible_ST &= distance_ST < (window or T)
    by_tile = visible_ST.reshape(-1, tiles.queries, T // tiles.keys, tiles.keys)
    visible_NM = by_tile.any(axis=(1, 3))

    segments_BT = jnp.asarray(segments_T)[None]
    seen = sight(jnp.asarray(places_S), segments_BT[:, places_S], segments_BT, window)
    N, M = visible_NM.shape
    of_queries_N4 = np.asarray(keys_visited(seen, tiles))[0]
    of_keys_MP4 = np.asarray(queries_visited(seen, tiles, split.piece))[0]
    by_queries_NM, whole_by_queries_NM = within(of_queries_N4, M)
    by_keys_NM, whole_by_keys_NM = (one.any(axis=1).T for one in within(of_keys_MP4, N))

    assert np.all(by_queries_NM >= visible_NM) and np.all(by_keys_NM >= visible_NM)
    assert visible_NM[range(N), of_queries_N4[:, 0]].all()
    assert visible_NM[range(N), of_queries_N4[:, 3] - 1].all()
    # All tiles between the first and the last that a tile of keys visits see it or are in a gap.
    first_N = visible_NM & (visible_NM.cumsum(axis=0) == 1)
    assert np.array_equal(by_keys_NM & first_N, first_N)
    # No mask where all is visible, and nowhere else.
    whole_NM = by_tile.all(axis=(1, 3))
    assert np.array_equal(whole_by_queries_NM, whole_NM)
    assert np.array_equal(whole_by_keys_NM, whole_NM)


def within(ranges_4, tiles):
    """Returns masks of the tiles in the outer and in the inner range, from (…, 4) ranges."""
    first, first_whole, after_whole, after = np.moveaxis(ranges_4[..., None], -2, 0)
    numbers = np.arange(tiles)
    return (first <= numbers) & (numbers < after), (
        (first_whole <= numbers) & (numbers < after_whole)
    )


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "head_dim", "dtype"),
    [
        *itertools.product(["a100:1x1", "h100:1x1", "b200:1x1"], [64, 80, 128, 256], ["bfloat16"]),
        # float32 needs the most shared memory, and an A100 has the least.
        *itertools.product(["a100:1x1"], [128, 256], ["float32"]),
    ],
)
def test_it_compiles_for_gpus_that_are_not_here(target, head_dim, dtype):
    _, devices = absent(target)
    mesh = make_mesh(devices=devices)

    def total(q, k, v, segments):
        return attend(q, k, v, segments, "triton", window=300).astype(jnp.float32).sum()

    S = 1_024
    shapes = [(1, S, 4, head_dim), *[(1, S, 2, head_dim)] * 2, (1, S)]
    arguments = [
        jax.ShapeDtypeStruct(
            shape, jnp.int32 if len(shape) == 2 else dtype, sharding=NamedSharding(mesh, P())
        )
        for shape in shapes
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*arguments).compile()
    # Nothing of the size of sequence × sequence.
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * S * 8 * head_dim * 4


def test_it_says_what_it_multiplies():
    B, S, H, D, window = 2, 256, 4, 64, 96
    shapes = [jax.ShapeDtypeStruct((B, S, H, D), jnp.bfloat16)] * 3
    segments = jax.ShapeDtypeStruct((B, S), jnp.int32)

    def total(q, k, v, segments):
        return attend(q, k, v, segments, "triton", window=window).astype(jnp.float32).sum()

    traced = jax.make_jaxpr(jax.grad(total, argnums=(0, 1, 2)))(*shapes, segments)
    kernels = [one for one in count_flops(traced, ()).matmuls if one.operation == "pallas_call"]
    seen = sum(min(place + 1, window) for place in range(S)) - S / 2  # a diagonal counts half
    product = 2 * B * H * D * seen
    assert sum(one.flops for one in kernels) == pytest.approx((2 + 3 + 4) * product, rel=1e-2)
    assert {one.sizes for one in kernels} == {(B * H, S, S, D)}


def test_tiles_divide_pieces():
    for piece in (16, 48, 80, 128, 1_000):
        *kernels, _ = launches_of(piece, 64, jnp.bfloat16)
        assert all(piece % size == 0 for launch in kernels for size in launch.tiles)
    assert launches_of(4_096, 128, jnp.bfloat16).mixed.tiles == Tiles(64, 64)


ROW, TILE = 128, 8


def pairs(info, device):
    """Returns (tile, column) of each computed tile, from a list of tiles for each column."""
    tiles, computed = info.data_next[device, 0], info.block_mask[device, 0]
    return {(int(tiles[i, j]), j) for i, j in zip(*np.nonzero(computed), strict=True)}


@pytest.mark.parametrize(
    ("order", "devices", "window"),
    itertools.product(["plain", "zigzag"], [1, 2, 4], [None, 1, 5, 8, 9, 40, 1_000]),
)
def test_they_are_those_in_which_a_query_sees_a_key(order, devices, window):
    places_CS = Split(order, ROW // devices, devices, 0).places_CS
    to_keys, to_queries = visited(places_CS, ROW, TILE, window)
    assert np.array_equal(to_keys.q_sequence, places_CS)
    for device, places_S in enumerate(places_CS):
        visible_ST = np.asarray(
            Visible(window)(jnp.asarray(places_S)[:, None], jnp.arange(ROW)[None])
        )
        distance_ST = places_S[:, None] - np.arange(ROW)
        assert np.array_equal(visible_ST, (distance_ST >= 0) & (distance_ST < (window or ROW)))
        visible_NM = visible_ST.reshape(-1, TILE, ROW // TILE, TILE).any(axis=(1, 3))
        expected = {(int(n), int(m)) for n, m in zip(*np.nonzero(visible_NM), strict=True)}
        of_queries = to_keys._replace(
            data_next=to_keys.data_next.swapaxes(2, 3), block_mask=to_keys.block_mask.swapaxes(2, 3)
        )
        assert {(n, m) for m, n in pairs(of_queries, device)} == expected
        assert pairs(to_queries, device) == expected
        # Tiles that are fetched but not computed exist.
        for info in (to_keys, to_queries):
            assert info.data_next.min() >= 0 and info.data_next.max() < ROW // TILE
