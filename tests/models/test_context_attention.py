"""Attention of rows that are split over `context`, against attention on one device in float64."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from outsider_runs import SIZES, experiment
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.models.attend import attend
from lmlib.models.attend.kernel import WAYS
from lmlib.models.families.llama import llama
from lmlib.parallel.layout import partition
from lmlib.parallel.mesh import make_mesh
from lmlib.row_order import ORDERS, places

pytestmark = pytest.mark.several_devices

B, S, H, D = 4, 1_024, 4, 8  # the smallest pieces are half a tile, the largest two
MESHES = {
    "context 2": {"context": 2},
    "context 4": {"context": 4},
    "context 8": {"context": 8},
    "fsdp 2, context 2, tensor 2": {"fsdp": 2, "context": 2, "tensor": 2},
}
WINDOWS = [None, 100, 300]  # within a tile; over several pieces
MODEL = functools.partial(llama, **SIZES, layers=1, heads=4, mlp=16)
KV_HEADS = [4, 2, 1]
CELLS = [
    cell
    for cell in itertools.product(WAYS, ORDERS, MESHES, KV_HEADS, WINDOWS)
    if not ("tensor" in cell[2] and cell[3] == 1)  # `gather` repeats such a head before
]
SHOWN = "ring", "balanced", "context 4", 1, 300
AT_EACH_LANDING = "gather", "balanced", "fsdp 2, context 2, tensor 2", 2, 300


@functools.cache
def arrays(kv_heads):
    """Queries, keys, values, segments and an arriving gradient; half of the rows are one document,
    the others several whose borders lie anywhere."""
    random = np.random.default_rng(kv_heads)
    q, d = random.normal(size=(2, B, S, H, D))
    k, v = random.normal(size=(2, B, S, kv_heads, D))
    segments = np.cumsum(random.random((B, S)) < 8 / S, axis=1)
    segments[: B // 2] = 1
    return q, k, v, d, segments.astype(np.int32)


def found(q, k, v, d, segments, window, way="auto", order="plain"):
    """The output, and the gradients of queries, keys and values."""

    @jax.jit
    def compute(q, k, v, d, segments):
        def output(q, k, v):
            implementation = "plain" if order is None else "auto"
            return attend(
                q, k, v, segments, implementation, window=window, soft_cap=20.0,
                order=order or "plain", way=way,
            )  # fmt: skip

        values, pullback = jax.vjp(output, q, k, v)
        return values, *pullback(d)

    return compute(q, k, v, d, segments)


@functools.cache
def on_one_device(kv_heads, window):
    with jax.enable_x64(True):
        return jax.device_get(found(*arrays(kv_heads), window, order=None))


def split(given, mesh, order):
    """Each array on the mesh, its tokens in the order of the devices."""
    order_S = places(S, mesh.shape["context"], order)
    layouts = ["heads", "kv_heads", "kv_heads", "heads"]
    named = [partition(f"batch seq {heads} head_dim") for heads in layouts]
    return [
        jax.device_put(x[:, order_S], NamedSharding(mesh, layout))
        for x, layout in zip(given, [*named, partition("batch seq")], strict=True)
    ]


def on_a_mesh(given, sizes, order, way, window):
    with jax.enable_x64(True), jax.set_mesh(mesh := make_mesh(**sizes)):
        values = jax.device_get(found(*split(given, mesh, order), window, way, order))
    back_S = np.argsort(places(S, mesh.shape["context"], order))
    return [each[:, back_S] for each in values]


@pytest.mark.parametrize(
    ("way", "order", "mesh", "kv_heads", "window"),
    sentinels(CELLS, SHOWN.__eq__, landing=AT_EACH_LANDING.__eq__),
)
def test_outputs_and_gradients_are_those_of_one_device(way, order, mesh, kv_heads, window):
    values = on_a_mesh(arrays(kv_heads), MESHES[mesh], order, way, window)
    for value, expected in zip(values, on_one_device(kv_heads, window), strict=True):
        assert np.abs(value - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_other_documents_change_nothing_bit_for_bit(way):
    q, k, v, d, segments = arrays(2)
    row = B - 1
    border = int(np.flatnonzero(np.diff(segments[row]))[2]) + 1
    own = segments[row] != segments[row, border]
    other_k, other_v = k.copy(), v.copy()
    other_k[row, ~own], other_v[row, ~own] = 100.0, -1e6
    both = [
        on_a_mesh((q, keys, values, d, segments), {"context": 4}, "balanced", way, None)
        for keys, values in ((k, v), (other_k, other_v))
    ]
    for before, after in zip(*both, strict=True):
        assert np.array_equal(before[row, own], after[row, own])
        assert np.array_equal(before[:row], after[:row])


def test_every_token_is_somewhere_once():
    for devices, order in itertools.product((1, 2, 3, 8), ORDERS):
        assert sorted(places(48, devices, order)) == list(range(48))
    assert [*places(8, 2, "balanced")] == [0, 1, 6, 7, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="a row of 10 tokens does not divide into the 4 pieces"):
        places(10, 2, "balanced")


def test_a_kernel_that_has_only_whole_rows_is_refused():
    run = experiment(MODEL, {"fsdp": 4, "context": 2}, Compute(attention="plain"))
    with pytest.raises(ValueError, match="attention='plain' cannot compute rows that context=2"):
        run.check()
    experiment(MODEL, {"fsdp": 8}, Compute(attention="plain")).check()
    experiment(MODEL, {"fsdp": 4, "context": 2}, Compute(attention="blockwise")).check()
