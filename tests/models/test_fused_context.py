"""Fused kernels over rows that are split over `context`, against the definition on one device in
float64. CPUs interpret the kernels."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_hardware import absent
from jax.sharding import NamedSharding
from outsider_runs import SIZES, experiment
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.models.attend import attend
from lmlib.models.families.llama import llama
from lmlib.parallel.layout import partition, sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.row_order import ORDERS, places

pytestmark = pytest.mark.several_devices

D = 64
KERNELS = ["splash", "triton"]
MESHES = {  # and the sequence, of which a piece is 128 tokens or some
    "context 2": ({"context": 2}, 1_024),
    "context 4": ({"context": 4}, 1_024),
    "context 8": ({"context": 8}, 2_048),
    "fsdp 2, context 2, tensor 2": ({"fsdp": 2, "context": 2, "tensor": 2}, 512),
}
WINDOWS = [None, 100, 300]
CELLS = list(itertools.product(KERNELS, ORDERS, MESHES, WINDOWS))
AT_EACH_LANDING = [
    ("triton", "balanced", "fsdp 2, context 2, tensor 2", 100),
    ("splash", "balanced", "context 4", None),
]


@functools.cache
def arrays(S):
    """Queries of four heads, keys and values of two, segments and an arriving gradient: a row that
    is one document, and one of several."""
    random = np.random.default_rng(S)
    q, d = random.normal(size=(2, 2, S, 4, D)).astype(np.float32)
    k, v = random.normal(size=(2, 2, S, 2, D)).astype(np.float32)
    segments = np.cumsum(random.random((2, S)) < 8 / S, axis=1)
    segments[0] = 1
    return q, k, v, d, segments.astype(np.int32)


def found(q, k, v, d, segments, window, implementation, order="plain"):
    """The output, and the gradients of queries, keys and values."""

    @jax.jit
    def compute(q, k, v, d, segments):
        def output(q, k, v):
            options = {"window": window, "soft_cap": 20.0, "order": order}
            return attend(q, k, v, segments, implementation, **options)

        values, pullback = jax.vjp(output, q, k, v)
        return values, *pullback(d)

    return compute(q, k, v, d, segments)


@functools.cache
def on_one_device(S, window):
    with jax.enable_x64(True):
        *given, segments = arrays(S)
        wide = [x.astype(np.float64) for x in given]
        return jax.device_get(found(*wide, segments, window, "plain"))


def split(given, mesh, order):
    """Each array on the mesh that is set, tokens in the order of the devices, and that order."""
    layouts = ["heads", "kv_heads", "kv_heads", "heads"]
    named = [partition(f"batch seq {heads} head_dim") for heads in layouts]
    order_S = places(given[0].shape[1], mesh.shape["context"], order)
    arrays = [
        jax.device_put(x[:, order_S], NamedSharding(mesh, layout))
        for x, layout in zip(given, [*named, partition("batch seq")], strict=True)
    ]
    return arrays, order_S


def on_a_mesh(given, sizes, order, kernel, window):
    with jax.set_mesh(mesh := make_mesh(**sizes)):
        arrays, order_S = split(given, mesh, order)
        values = jax.device_get(found(*arrays, window, kernel, order))
    return [each[:, np.argsort(order_S)] for each in values]


@pytest.mark.parametrize(
    ("kernel", "order", "mesh", "window"),
    sentinels(CELLS, landing=AT_EACH_LANDING.__contains__),
)
def test_outputs_and_gradients_are_those_of_one_device(kernel, order, mesh, window):
    sizes, S = MESHES[mesh]
    values = on_a_mesh(arrays(S), sizes, order, kernel, window)
    for value, expected in zip(values, on_one_device(S, window), strict=True):
        assert np.abs(value - expected).max() <= 4e-6 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_documents_change_nothing_bit_for_bit(kernel):
    q, k, v, d, segments = arrays(1_024)
    border = int(np.flatnonzero(np.diff(segments[1]))[2]) + 1
    own = segments[1] != segments[1, border]
    other_k, other_v = k.copy(), v.copy()
    other_k[1, ~own], other_v[1, ~own] = 100.0, -1e6
    both = [
        on_a_mesh((q, keys, values, d, segments), {"context": 4}, "balanced", kernel, None)
        for keys, values in ((k, v), (other_k, other_v))
    ]
    for before, after in zip(*both, strict=True):
        assert np.array_equal(before[1, own], after[1, own])
        assert np.array_equal(before[0], after[0])


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
def test_sinks_take_their_share_of_split_rows(implementation):
    q, k, v, d, segments = arrays(512)
    sinks_H = np.array([-2.0, 0.0, 3.0, 30.0], np.float32)

    def gradients(q, k, v, d, segments, sinks_H, implementation, order="plain"):
        def output(q, k, v, sinks_H):
            options = {"window": 100, "sinks_H": sinks_H, "order": order}
            return attend(q, k, v, segments, implementation, **options)

        values, pullback = jax.vjp(output, q, k, v, sinks_H)
        return values, *pullback(d)

    compute = jax.jit(gradients, static_argnames=("implementation", "order"))
    with jax.default_matmul_precision("highest"):
        whole = compute(q, k, v, d, segments, sinks_H, implementation="plain")
        with jax.set_mesh(mesh := make_mesh(fsdp=2, context=4)):
            laid_out, order_S = split((q, k, v, d, segments), mesh, "balanced")
            found = compute(*laid_out, sinks_H, implementation=implementation, order="balanced")
    for value, expected in zip(found[:4], whole[:4], strict=True):
        error = np.asarray(value)[:, np.argsort(order_S)] - expected
        assert np.abs(error).max() <= 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(found[4], whole[4], rtol=1e-4, atol=1e-4)


MODEL = functools.partial(llama, **SIZES, layers=1, heads=4, mlp=16)


def test_pieces_that_a_kernel_cannot_compute_are_refused():
    run = experiment(MODEL, {"fsdp": 2, "context": 4}, Compute(attention="triton"))
    length = run.data.sequence_length
    message = f"context=4 cuts rows of {length} tokens into pieces of {length // 8}: .* multiple of"
    with pytest.raises(ValueError, match=message):
        run.check()


def test_a_kernel_has_no_ring():
    run = experiment(MODEL, {"fsdp": 4, "context": 2}, Compute(attention="splash", context="ring"))
    with pytest.raises(ValueError, match="rows whose keys are gathered, not context='ring'"):
        run.check()


GENERATIONS = {
    "v4:2x2x1": "splash",
    "v5e:2x2": "splash",
    "v5p:2x2x1": "splash",
    "v6e:2x2": "splash",
    "7x:2x2x1": "splash",
    "a100:1x4": "attention_",
    "h100:1x4": "attention_",
    "b200:1x4": "attention_",
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
        return attend(q, k, v, segments, order="balanced").astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*arguments).compile()
    assert GENERATIONS[target] in compiled.as_text()
