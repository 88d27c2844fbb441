"""Attention of rows that are split over `context`, against attention on one device in float64: by
tiles in two ways, and by fused kernels, which CPUs interpret."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import absent
from jax.sharding import NamedSharding
from outsider_runs import SIZES, experiment
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.models.attend import attend
from lmlib.models.attend.kernel import CONTEXT_METHODS
from lmlib.models.families.llama import llama
from lmlib.parallel.layout import partition, sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.row_order import ORDERS, places

pytestmark = pytest.mark.several_devices

FUSED = ("splash", "triton")
MESHES = {
    "context 2": {"context": 2},
    "context 4": {"context": 4},
    "context 8": {"context": 8},
    "fsdp 2, context 2, tensor 2": {"fsdp": 2, "context": 2, "tensor": 2},
}
# Pieces for tiles have half a tile to two tiles. Pieces for kernels have 128 tokens or a few.
OF_TILES = dict.fromkeys(MESHES, 1_024)
OF_KERNELS = {**OF_TILES, "context 8": 2_048, "fsdp 2, context 2, tensor 2": 512}
WINDOWS = [None, 100, 300]  # within a tile; over several pieces
MODEL = functools.partial(llama, **SIZES, layers=1, heads=4, mlp=16)
CELLS = [
    cell
    for cell in itertools.product(CONTEXT_METHODS, ORDERS, MESHES, (4, 2, 1), WINDOWS)
    if not ("tensor" in cell[2] and cell[3] == 1)  # `gather` repeats such a head before
] + [*itertools.product(FUSED, ORDERS, MESHES, (2,), WINDOWS)]
SHOWN = (
    ("ring", "zigzag", "context 4", 1, 300),
    ("triton", "zigzag", "fsdp 2, context 2, tensor 2", 2, 100),
)
AT_EACH_LANDING = (
    ("gather", "zigzag", "fsdp 2, context 2, tensor 2", 2, 300),
    ("splash", "zigzag", "context 4", 2, None),
)


@functools.cache
def arrays(fused, S, kv_heads):
    """Queries of four heads, keys, values, an arriving gradient and segments; half of the rows are
    one document, the others several with borders anywhere."""
    random, (B, D) = np.random.default_rng(kv_heads), (2, 64) if fused else (4, 8)
    q, d = random.normal(size=(2, B, S, 4, D))
    k, v = random.normal(size=(2, B, S, kv_heads, D))
    segments = np.cumsum(random.random((B, S)) < 8 / S, axis=1)
    segments[: B // 2] = 1
    return q, k, v, d, segments.astype(np.int32)


def found(q, k, v, d, segments, *sinks, window, implementation="plain", **settings):
    """The output, and the gradients of queries, keys and values, and of sinks if there are some."""

    @jax.jit
    def compute(q, k, v, d, segments, *sinks):
        def output(q, k, v, *sinks):
            return attend(
                q, k, v, segments, implementation, window=window, **settings,
                soft_cap=None if sinks else 20.0, sinks_H=sinks[0] if sinks else None,
            )  # fmt: skip

        values, pullback = jax.vjp(output, q, k, v, *sinks)
        return values, *pullback(d)

    return compute(q, k, v, d, segments, *sinks)


@functools.cache
def on_one_device(fused, S, kv_heads, window):
    with jax.enable_x64(True):
        return jax.device_get(found(*arrays(fused, S, kv_heads), window=window))


def on_a_mesh(given, *sinks, sizes, order, kernel, window):
    """Same as `found`, with arrays on the mesh and tokens in the devices' order and back. Tiles
    compute in float64, fused kernels in float32."""
    fused = kernel in FUSED
    settings = {"implementation": kernel if fused else "auto", "order": order}
    settings["context_method"] = "auto" if fused else kernel
    with jax.enable_x64(not fused), jax.set_mesh(mesh := make_mesh(**sizes)):
        order_S = places(given[0].shape[1], mesh.shape["context"], order)
        heads = ["heads", "kv_heads", "kv_heads", "heads"]
        layouts = [*(f"batch seq {each} head_dim" for each in heads), "batch seq"]
        placed = [
            jax.device_put(
                x[:, order_S].astype(np.float32) if fused and x.ndim == 4 else x[:, order_S],
                NamedSharding(mesh, partition(layout)),
            )
            for x, layout in zip(given, layouts, strict=True)
        ]
        values = jax.device_get(found(*placed, *sinks, window=window, **settings))
    return [x[:, np.argsort(order_S)] if x.ndim == 4 else x for x in values]


@pytest.mark.parametrize(
    ("kernel", "order", "mesh", "kv_heads", "window"),
    sentinels(CELLS, SHOWN.__contains__, landing=AT_EACH_LANDING.__contains__),
)
def test_outputs_and_gradients_equal_those_of_one_device(kernel, order, mesh, kv_heads, window):
    fused = kernel in FUSED
    S, tolerance = (OF_KERNELS[mesh], 4e-6) if fused else (OF_TILES[mesh], 1e-12)
    given = arrays(fused, S, kv_heads)
    values = on_a_mesh(given, sizes=MESHES[mesh], order=order, kernel=kernel, window=window)
    for value, expected in zip(values, on_one_device(fused, S, kv_heads, window), strict=True):
        assert np.abs(value - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gather", "triton"])
def test_sinks_take_their_share_of_split_rows(kernel):
    given, sinks_H = arrays(True, 512, 2), np.array([-2.0, 0.0, 3.0, 30.0], np.float32)
    with jax.enable_x64(True):
        whole = jax.device_get(found(*given, sinks_H, window=100))
    settings = {"sizes": {"fsdp": 2, "context": 4}, "order": "zigzag", "window": 100}
    values = on_a_mesh(given, sinks_H, kernel=kernel, **settings)
    for value, expected in zip(values, whole, strict=True):
        assert np.abs(value - expected).max() <= 1e-5 * np.abs(expected).max()


def test_every_token_is_somewhere_once():
    for devices, order in itertools.product((1, 2, 3, 8), ORDERS):
        assert sorted(places(48, devices, order)) == list(range(48))
    assert [*places(8, 2, "zigzag")] == [0, 1, 6, 7, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="a row of 10 tokens does not divide into the 4 pieces"):
        places(10, 2, "zigzag")


LENGTH = experiment(MODEL, {}).data.sequence_length


@pytest.mark.parametrize(
    ("context", "settings", "message"),
    [
        (2, {"attention": "plain"}, "'plain' cannot compute rows that context=2"),
        (
            2,
            {"attention": "splash", "context_method": "ring"},
            "keys are gathered, not context_method='ring'",
        ),
        (
            4,
            {"attention": "triton"},
            f"context=4 cuts rows of {LENGTH} tokens into pieces of {LENGTH // 8}: .* multiple of",
        ),
    ],
)
def test_a_kernel_that_cannot_compute_split_rows_is_refused(context, settings, message):
    with pytest.raises(ValueError, match=message):
        experiment(MODEL, {"fsdp": 2, "context": context}, Compute(**settings)).check()
    experiment(MODEL, {"fsdp": 8}, Compute(attention="plain")).check()
    experiment(MODEL, {"fsdp": 4, "context": 2}, Compute(attention="blockwise")).check()


GENERATIONS = {
    **dict.fromkeys(("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "7x:2x2x1"), "splash"),
    **dict.fromkeys(("a100:1x4", "h100:1x4", "b200:1x4"), "attention_"),
}


@pytest.mark.parametrize("target", sentinels(GENERATIONS, landing="v5e:2x2".__eq__))
def test_each_generation_compiles_its_kernel_for_split_rows(target):
    _, devices = absent(target)
    mesh = make_mesh(context=-1, devices=devices)
    axes = ["batch seq heads head_dim", *["batch seq kv_heads head_dim"] * 2, "batch seq"]
    shapes = [(1, 2_048, 2, 128), *[(1, 2_048, 1, 128)] * 2, (1, 2_048)]
    arguments = [
        jax.ShapeDtypeStruct(
            shape, np.int32 if len(shape) == 2 else jnp.bfloat16, sharding=sharding(names, mesh)
        )
        for shape, names in zip(shapes, axes, strict=True)
    ]

    def total(q, k, v, segments):
        return attend(q, k, v, segments, order="zigzag").astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*arguments).compile()
    assert GENERATIONS[target] in compiled.as_text()
