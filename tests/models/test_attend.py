"""Every implementation of attention against the definition in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import absent
from refusals import refusals
from sentinels import sentinels

from lmlib.models.attend import IMPLEMENTATIONS, attend, check_attention, chosen
from lmlib.models.attend.blockwise import best_tile
from lmlib.models.attend.kernel import Shapes
from lmlib.models.attend.plain import attention_weights
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh

# CPUs interpret splash and triton; cudnn needs an NVIDIA GPU.
FUSED = ["cudnn" if jax.default_backend() == "gpu" else "splash", "triton"]
RUNNABLE = ["plain", "blockwise", *FUSED]
BUT_FUSED = sentinels(RUNNABLE, lambda name: name not in FUSED)
B, S, H, K, D = 2, 256, 4, 2, 64
OPTIONS = [
    *({"window": window} for window in (None, 1, 100, 128, 129, 1_000)),
    # Each with and without each other.
    {"scale": 0.3},
    {"soft_cap": 2.0},
    {"window": 100, "scale": 0.3},
    {"window": 100, "scale": 0.3, "soft_cap": 2.0},
]
CASES = [
    (implementation, options)
    for implementation in RUNNABLE
    for options in OPTIONS
    if not (implementation == "cudnn" and "soft_cap" in options)
]


def inputs(sequence=S, heads=H, kv_heads=K, head_dim=D, value_dim=None):
    """Queries, keys, values, segments that begin and end inside tiles, and an arriving gradient."""
    random = np.random.default_rng(0)
    q_BSHD, d_BSHD = random.normal(size=(2, B, sequence, heads, head_dim)).astype(np.float32)
    k_BSKD, v_BSKD = random.normal(size=(2, B, sequence, kv_heads, head_dim)).astype(np.float32)
    if value_dim is not None:
        d_BSHD = random.normal(size=(B, sequence, heads, value_dim)).astype(np.float32)
        v_BSKD = random.normal(size=(B, sequence, kv_heads, value_dim)).astype(np.float32)
    borders_BS = random.random((B, sequence)) < 4 / sequence
    return q_BSHD, k_BSKD, v_BSKD, np.cumsum(borders_BS, axis=1).astype(np.int32), d_BSHD


def reference(
    q_BSHD, k_BSKD, v_BSKD, segments_BS, d_BSHD, window, scale=None, soft_cap=None, sinks_H=None
):
    """The output and the gradients for q, k, v and sinks, head by head and in float64."""
    sequence, heads, head_dim = q_BSHD.shape[1:]
    group = heads // k_BSKD.shape[2]
    output, dq, dk, dv = (np.zeros(x.shape) for x in (d_BSHD, q_BSHD, k_BSKD, v_BSKD))
    d_sinks_H = np.zeros(heads)
    distance_ST = np.arange(sequence)[:, None] - np.arange(sequence)
    near_ST = (distance_ST >= 0) & (distance_ST < (window or sequence))
    for b, h in np.ndindex(len(q_BSHD), heads):
        q_SD = q_BSHD[b, :, h].astype(np.float64)
        k_SD, v_SD = (x[b, :, h // group].astype(np.float64) for x in (k_BSKD, v_BSKD))
        allowed_ST = near_ST & (segments_BS[b][:, None] == segments_BS[b])
        scores_ST = q_SD @ k_SD.T * (scale or head_dim**-0.5)
        slope_ST = np.full(scores_ST.shape, scale or head_dim**-0.5)
        if soft_cap is not None:
            scores_ST = soft_cap * np.tanh(scores_ST / soft_cap)
            slope_ST *= 1 - (scores_ST / soft_cap) ** 2
        scores_ST = np.where(allowed_ST, scores_ST, -np.inf)
        highest_S1 = scores_ST.max(axis=1, keepdims=True)
        weights_ST = np.exp(scores_ST - highest_S1)
        sink_S1 = 0 * highest_S1 if sinks_H is None else np.exp(sinks_H[h] - highest_S1)
        normaliser_S1 = weights_ST.sum(axis=1, keepdims=True) + sink_S1
        weights_ST, sink_S1 = weights_ST / normaliser_S1, sink_S1 / normaliser_S1
        d_SD = d_BSHD[b, :, h].astype(np.float64)
        output[b, :, h] = weights_ST @ v_SD
        d_weights_ST = d_SD @ v_SD.T
        inner_S1 = (weights_ST * d_weights_ST).sum(axis=1, keepdims=True)
        d_sinks_H[h] -= (sink_S1 * inner_S1).sum()
        d_scores_ST = weights_ST * (d_weights_ST - inner_S1) * slope_ST
        dq[b, :, h] = d_scores_ST @ k_SD
        dk[b, :, h // group] += d_scores_ST.T @ q_SD
        dv[b, :, h // group] += weights_ST.T @ d_SD
    return (output, dq, dk, dv) if sinks_H is None else (output, dq, dk, dv, d_sinks_H)


def found(implementation, q, k, v, segments_BS, d_BSHD, window, sinks_H=None, **options):
    """The output and the gradients for q, k, v and, if there are some, sinks."""

    @jax.jit
    def compute(q, k, v, segments_BS, d_BSHD, *sinks):
        def output(q, k, v, *sinks):
            every = {"window": window, "sinks_H": sinks[0] if sinks else None, **options}
            return attend(q, k, v, segments_BS, implementation, **every)

        values, pullback = jax.vjp(output, q, k, v, *sinks)
        return values, *pullback(d_BSHD)

    return compute(q, k, v, segments_BS, d_BSHD, *([] if sinks_H is None else [sinks_H]))


def assert_close(values, expected, tolerance):
    for value, right in zip(values, expected, strict=True):
        error = np.linalg.norm(np.asarray(value, np.float64) - right)
        # Inputs are of the order of one, and some gradients are zero.
        assert error <= tolerance * max(np.linalg.norm(right), right.size**0.5)


def assert_bfloat16_is_close(implementation, whole_rows=False, **options):
    *arrays, d_BSHD = inputs()
    if whole_rows:
        arrays[3] = np.zeros_like(arrays[3])
    q, k, v, d_BSHD = (jnp.asarray(x, jnp.bfloat16) for x in (*arrays[:3], d_BSHD))
    segments_BS = None if whole_rows else arrays[3]
    values = found(implementation, q, k, v, segments_BS, d_BSHD, **options)
    assert all(value.dtype == jnp.bfloat16 for value in values)
    wide = [np.asarray(x.astype(jnp.float32)) for x in (q, k, v)]
    expected = reference(*wide, arrays[3], np.asarray(d_BSHD.astype(jnp.float32)), **options)
    # A rounding to 8 bits is off by at most 2⁻⁹; four of them follow each other.
    assert_close(values, expected, 4 * 2**-9)


@pytest.mark.parametrize(
    ("implementation", "options"),
    sentinels(
        CASES,
        lambda case: len(case[1]) == 3 or (case[1] == {"window": 129} and case[0] not in FUSED),
    ),
)
def test_outputs_and_gradients_match_the_definition(implementation, options):
    """Uses float32, or bfloat16 for an implementation without a wider dtype."""
    options = {"window": None} | options
    if implementation == "cudnn":
        assert_bfloat16_is_close(implementation, **options)
        return
    arrays = inputs()
    with jax.default_matmul_precision("highest"):
        values = found(implementation, *arrays, **options)
    assert_close(values, reference(*arrays, **options), 2e-6 if len(options) == 1 else 4e-6)


@pytest.mark.parametrize(
    "options", sentinels([{"window": None}, {"window": 100, "scale": 0.3}], lambda o: len(o) == 2)
)
@pytest.mark.parametrize("whole_rows", [False, True])
def test_the_arguments_of_cudnn_follow_the_definition(options, whole_rows, monkeypatch):
    """Its kernel runs only on NVIDIA GPUs, but XLA accepts the same call elsewhere."""
    call = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **settings):
        assert implementation == "cudnn"
        return call(*arrays, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    assert_bfloat16_is_close("cudnn", whole_rows=whole_rows, **options)


@pytest.mark.landing
@pytest.mark.parametrize("implementation", BUT_FUSED)
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), sentinels([(64, 128), (128, 64)], lambda sizes: sizes == (128, 64))
)
def test_values_may_be_of_another_size(implementation, head_dim, value_dim):
    arrays = inputs(S, 2, 1, head_dim, value_dim)
    if implementation == "cudnn":
        arrays = tuple(jnp.asarray(x, x.dtype if x.ndim < 4 else jnp.bfloat16) for x in arrays)
    with jax.default_matmul_precision("highest"):
        values = found(implementation, *arrays, None)
    arrays = [np.asarray(x, np.float32 if x.ndim == 4 else np.int32) for x in arrays]
    assert_close(values, reference(*arrays, None), 4 * 2**-9 if implementation == "cudnn" else 2e-6)


OF_SINKS = [{"window": None}, {"window": 100, "scale": 0.3, "soft_cap": 2.0}]


@pytest.mark.parametrize(
    "options", sentinels(OF_SINKS, OF_SINKS[-1].__eq__), ids=["plainly", "with all options"]
)
@pytest.mark.parametrize(
    "implementation",
    sentinels(["plain", "blockwise", "triton"], "blockwise".__eq__, landing="triton".__eq__),
)
def test_sinks_are_logits_without_a_value(implementation, options):
    arrays, sinks_H = inputs(208), np.array([-2.0, 0.0, 3.0, 30.0], np.float32)
    with jax.default_matmul_precision("highest"):
        values = found(implementation, *arrays, sinks_H=sinks_H, **options)
    expected = reference(*arrays, **options, sinks_H=sinks_H.astype(np.float64))
    assert_close(values, expected, 4e-6)
    q, k, v, segments_BS = (jnp.asarray(x) for x in arrays[:4])
    weights_BHST = attention_weights(q, k, segments_BS, **options, sinks_H=jnp.asarray(sinks_H))
    mixed_BSHD = jnp.einsum("bhst,bthd->bshd", weights_BHST, jnp.repeat(v, H // K, axis=2))
    np.testing.assert_allclose(mixed_BSHD, expected[0], atol=1e-5)


@pytest.mark.landing
@pytest.mark.parametrize(
    ("sequence", "heads", "kv_heads", "head_dim"),
    sentinels(
        [(1, 1, 1, 2), (97, 3, 1, 8), (128, 2, 2, 16), (300, 6, 3, 10), (385, 2, 1, 4)],
        lambda sizes: sizes == (300, 6, 3, 10),
    ),
)
@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
def test_any_shape_will_do(implementation, sequence, heads, kv_heads, head_dim):
    arrays = inputs(sequence, heads, kv_heads, head_dim)
    values = found(implementation, *arrays, None)
    assert_close(values, reference(*arrays, None), 2e-6)


@pytest.mark.landing
@pytest.mark.parametrize("implementation", BUT_FUSED)
def test_bfloat16_comes_within_its_rounding(implementation):
    assert_bfloat16_is_close(implementation, window=None)


@pytest.mark.parametrize("implementation", sentinels(RUNNABLE, "blockwise".__eq__))
def test_rows_of_one_document_need_no_segments(implementation):
    q, k, v, _, d_BSHD = (jnp.asarray(x, jnp.bfloat16) for x in inputs())
    one_BS = jnp.ones((B, S), jnp.int32)
    values = found(implementation, q, k, v, None, d_BSHD, None)
    for value, expected in zip(
        values, found(implementation, q, k, v, one_BS, d_BSHD, None), strict=True
    ):
        if implementation == "cudnn":  # another kernel
            assert_close([value], [np.asarray(expected, np.float64)], 4 * 2**-9)
        else:
            np.testing.assert_array_equal(value, expected)


@pytest.mark.several_devices
@pytest.mark.parametrize("implementation", ["plain", "blockwise"])
@pytest.mark.parametrize(
    "mesh", sentinels([{"tensor": 2}, {"data": 2, "tensor": 2}, {"fsdp": 2}], lambda m: len(m) == 2)
)
def test_the_mesh_changes_nothing(implementation, mesh):
    arrays, sinks_H = inputs(), np.array([-2.0, 0.0, 3.0, 30.0], np.float32)
    mesh = make_mesh(**mesh)
    axes = ["batch seq heads head_dim", *["batch seq kv_heads head_dim"] * 2, "batch seq"]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, sharding(names, mesh))
            for x, names in zip(arrays, [*axes, axes[0]], strict=True)
        ]
        sinks = jax.device_put(sinks_H, sharding("heads", mesh))
        compute = functools.partial(found, implementation, window=None)
        values = jax.jit(compute)(*placed, sinks_H=sinks)
    expected = reference(*arrays, None, sinks_H=sinks_H.astype(np.float64))
    assert_close(values, expected, 2e-6)
    for value, array in zip(values, [placed[0], *placed[:3], sinks], strict=True):
        assert value.sharding.is_equivalent_to(array.sharding, value.ndim)


@pytest.mark.landing
def test_blockwise_needs_no_square_of_the_sequence():
    sequence = 8_192
    shape = jax.ShapeDtypeStruct((1, sequence, 1, 64), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, sequence), jnp.int32)

    def gradients(implementation):
        compute = functools.partial(found, implementation, window=None)
        compiled = jax.jit(compute).lower(shape, shape, shape, segments, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert gradients("plain") > 4 * sequence**2
    assert gradients("blockwise") < 4 * sequence**2 / 10


@pytest.mark.parametrize("window", [None, 200])
def test_blockwise_leaves_tiles_out_that_nobody_sees(window):
    sequence = 2_048
    tile = best_tile()
    arrays = inputs(sequence, 1, 1, 8)[:4]

    def visits(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                yield equation.params["length"]
            for parameter in equation.params.values():
                inner = getattr(parameter, "jaxpr", parameter)
                if hasattr(inner, "eqns"):
                    yield from visits(inner)

    compute = functools.partial(attend, implementation="blockwise", window=window)
    traced = jax.make_jaxpr(compute)(*map(jnp.asarray, arrays))
    seen = np.abs(np.subtract.outer(np.arange(sequence), np.arange(sequence))) < (
        window or sequence
    )
    tiles = np.tril(seen).reshape(sequence // tile, tile, -1, tile).any(axis=(1, 3))
    assert list(visits(traced.jaxpr)) == [tiles.sum()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "expected"),
    [("v5e:2x2", ("splash", "splash", "splash")), ("h100:1x1", ("triton", "cudnn", "triton"))],
)
def test_auto_takes_the_best_kernel_for_whole_rows_and_for_soft_caps(target, expected):
    _, devices = absent(target)
    shapes = Shapes(S, D, jnp.bfloat16)
    with jax.set_mesh(make_mesh(devices=devices)):
        capped = chosen(shapes._replace(soft_cap=50.0), whole_rows=True)
        assert (chosen(shapes), chosen(shapes, whole_rows=True), capped) == expected


def test_auto_takes_what_the_device_is_best_at():
    on_a_gpu = jax.default_backend() == "gpu"
    for dtype in (jnp.bfloat16, jnp.float32):
        assert chosen(Shapes(S, D, dtype)) == ("triton" if on_a_gpu else "blockwise")
    assert chosen(Shapes(S, D, jnp.bfloat16), whole_rows=True) == (
        "cudnn" if on_a_gpu else "blockwise"
    )
    assert set(IMPLEMENTATIONS) - set(RUNNABLE) == {"splash" if on_a_gpu else "cudnn"}


@pytest.mark.parametrize(("implementation", "options", "message"), refusals(__file__, "attention"))
def test_shapes_that_a_kernel_does_not_support_are_refused(implementation, options, message):
    shapes = Shapes(S, D, jnp.bfloat16)._replace(**options)
    check_attention("auto", shapes)
    with pytest.raises(ValueError, match=f"{message}; use 'blockwise' or 'auto'"):
        check_attention(implementation, shapes)
    q, k, v, segments_BS, _ = (jnp.asarray(x)[:, : shapes.sequence_length] for x in inputs())
    q, k, v = (x.astype(shapes.dtype) for x in (q, k, v))
    given = {"soft_cap": shapes.soft_cap, "sinks_H": jnp.zeros(H) if shapes.sinks else None}
    with pytest.raises(ValueError, match=f"{message}; use attention='blockwise' or 'auto'"):
        attend(q, k, v, segments_BS, implementation, **given)
