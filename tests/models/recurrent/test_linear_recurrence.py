"""The recurrence chunk by chunk, against a loop over the tokens in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent import chunks, triangles, triton_chunks
from lmlib.models.recurrent.linear_recurrence import linear_recurrence
from lmlib.parallel.layout import partition
from lmlib.parallel.mesh import make_mesh
from lmlib.row_order import ORDERS, places

B, H, K, V = 2, 4, 5, 3
QUERIES, HEADS = "batch seq kv_heads head_dim", "batch seq heads head_dim"
KINDS = {  # delta rule, decay per channel, groups of heads
    "gated delta rule": (True, False, 2),
    "decay of heads": (False, False, 1),
    "delta rule, decay of channels": (True, True, 4),
    "decay of channels": (False, True, 2),
}
TOLERANCE = 2e-5


def inputs(kind, S, seed=0, strong=False, equal=False):
    """Queries, keys, values, logarithms of decays, rates and a state, in float64."""
    random, (delta, of_channels, groups) = np.random.default_rng(seed), KINDS[kind]
    q, k = random.normal(size=(2, B, S, groups, K))
    if equal:
        k[:] = k[:, :1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, state = random.normal(size=(B, S, H, V)), random.normal(size=(B, H, K, V))
    log_decay = -np.exp(random.normal(size=(B, S, H, K) if of_channels else (B, S, H)) - 2)
    if strong:
        log_decay = np.where(random.random(log_decay.shape) < 0.3, -50.0, log_decay)
    if equal:
        log_decay *= 0
    rates = 1 / (1 + np.exp(-random.normal(size=(B, S, H)))) if delta else None
    return q, k, v, log_decay, np.ones_like(rates) if equal else rates, state


def token_by_token(q, k, v, log_decay, beta, state, segments, counts):
    """The definition, which JAX differentiates."""
    q, k = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q, k))
    decay = jnp.broadcast_to(jnp.exp(log_decay.reshape(*log_decay.shape[:3], -1)), k.shape)

    def step(carry, token):
        (state, before), (q, k, v, decay, beta, segment, counts) = carry, token
        continues = (segment == before)[:, None, None, None]
        new = jnp.where(continues, state * decay[..., None], 0)
        if beta is not None:
            v = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, new))
        new = new + k[..., None] * v[:, :, None]
        state = jnp.where(counts[:, None, None, None], new, state)
        before = jnp.where(counts, segment, before)
        return (state, before), jnp.einsum("bhk,bhkv->bhv", q, state)

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, v, decay, beta, segments, counts))
    (state, _), y = jax.lax.scan(step, (state, segments[:, 0]), tokens)
    return y.swapaxes(0, 1), state


def with_gradients(function, arrays, d_y, d_state):
    (y, state), pullback = jax.vjp(lambda given: function(*given), arrays)
    return y, state, pullback((d_y.astype(y.dtype), d_state.astype(state.dtype)))


@functools.partial(jax.jit, static_argnames=("chunk", "order"))
def found(arrays, d_y, d_state, segments, positions, chunk, order="plain"):
    context = ForwardContext(positions, segments, Compute(recurrent_chunk=chunk), order=order)
    return with_gradients(
        lambda *given: linear_recurrence(*given[:5], context, given[5]), arrays, d_y, d_state
    )


@jax.jit
def expected(arrays, d_y, d_state, segments, positions):
    def function(*given):
        return token_by_token(*given, segments, positions >= 0)

    return with_gradients(function, arrays, d_y, d_state)


def cotangents(S, counts=None):
    random = np.random.default_rng(9)
    d_y = random.normal(size=(B, S, H, V))
    return d_y if counts is None else d_y * counts[..., None, None], random.normal(
        size=(B, H, K, V)
    )


def positions_of(S, lengths=(99, 99)):
    at = np.arange(S)
    return np.where(at < np.array(lengths)[:, None], at, -1).astype(np.int32)


def check(arrays, segments, positions, chunk, tolerance=TOLERANCE):
    S = arrays[0].shape[1]
    others = *cotangents(S, positions >= 0), segments, positions
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)
    values = found(narrow, *others, chunk=chunk)
    with jax.enable_x64(True):
        known = jax.device_get(expected(arrays, *others))
    for value, right in zip(*map(jax.tree.leaves, (values, known)), strict=True):
        value = np.asarray(value, np.float64)
        if value.shape == (B, S, H, V):
            value, right = (x * (positions >= 0)[..., None, None] for x in (value, right))
        assert np.abs(value - right).max() <= tolerance * np.abs(right).max()


# The second row has a document that starts with a chunk of 8 tokens, and two of one token.
SEGMENTS = np.array(
    [[0] * 9 + [3] * 14 + [4] * 14, [0] * 8 + [1, 2, 3] + [4] * 5 + [5] * 21], np.int32
)


@pytest.mark.parametrize(
    ("kind", "chunk"),
    sentinels(
        [(kind, chunk) for kind in KINDS for chunk in (1, 3, 8, 16, 64)],
        lambda case: case[1] == 8,
        landing=lambda case: case[1] == 64,
    ),
)
def test_values_and_gradients_equal_those_of_a_loop_over_tokens(kind, chunk):
    check(inputs(kind, 37), SEGMENTS, positions_of(37), chunk)


@pytest.mark.parametrize("kind", KINDS)
def test_values_equal_those_of_numpy(kind):
    q, k, v, log_decay, beta, state = inputs(kind, 37)
    values = found(
        (q, k, v, log_decay, beta, state), *cotangents(37), SEGMENTS, positions_of(37), chunk=8
    )
    state = state.copy()
    for b, t, h in np.ndindex(B, 37, H):
        at = b, t, h * q.shape[2] // H
        if t and SEGMENTS[b, t] != SEGMENTS[b, t - 1]:
            state[b, h] = 0
        own = state[b, h] * np.exp(log_decay[b, t, h]).reshape(-1, 1)
        value = v[b, t, h] if beta is None else beta[b, t, h] * (v[b, t, h] - k[at] @ own)
        state[b, h] = own + np.outer(k[at], value)
        np.testing.assert_allclose(values[0][b, t, h], q[at] @ state[b, h], atol=2e-5)
    np.testing.assert_allclose(values[1], state, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays_take_no_digits(kind):
    check(inputs(kind, 37, strong=True), SEGMENTS, positions_of(37), chunk=8)
    check(inputs(kind, 37, strong=True), SEGMENTS * 0, positions_of(37), chunk=64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("delta rule, decay of channels", "decay of heads"))
def test_long_chunks_take_no_digits(kind):
    *others, log_decay, rates, state = inputs(kind, 512)
    log_decay = -0.4 - np.random.default_rng(1).random(log_decay.shape) / 20
    arrays = *others, log_decay, rates, state
    check(arrays, np.zeros((B, 512), np.int32), positions_of(512, (512, 512)), 512, 3e-6)


def test_equal_keys_take_no_digits():
    """Powers of their matrix A have binomial coefficients for elements."""
    check(
        inputs("gated delta rule", 64, equal=True),
        np.zeros((B, 64), np.int32),
        positions_of(64),
        64,
    )


@pytest.mark.parametrize("platform", ("cpu", "tpu"))
def test_inverse_of_equal_keys(platform, monkeypatch):
    monkeypatch.setattr(triangles, "platform", lambda: platform)
    rates = np.random.default_rng(0).uniform(size=(3, 64, 1)).astype(np.float32)
    rates[0] = 1
    lower_LL = np.tril(np.broadcast_to(rates, (3, 64, 64)), -1)
    exact_LL = np.linalg.inv(np.eye(64) + lower_LL)
    found_LL = triangles.unit_inverse(jnp.asarray(lower_LL))
    np.testing.assert_allclose(found_LL, exact_LL, atol=5e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_at_the_end_of_a_row_changes_no_state(kind):
    arrays = inputs(kind, 37)
    segments = np.where(positions_of(37, (30, 0)) >= 0, SEGMENTS, 77).astype(np.int32)
    check(arrays, segments, positions_of(37, (30, 0)), 8)


def test_a_number_that_is_none_stays_in_its_row_but_not_in_its_document():
    *tokens, state = inputs("gated delta rule", 37)
    tokens[2][1, 10] = np.nan  # a document of one token, in a chunk with others
    y = found((*tokens, state), *cotangents(37), SEGMENTS, positions_of(37), chunk=8)[0]
    assert np.isfinite(y[0]).all() and np.isfinite(y[1, :8]).all()
    assert np.isnan(y[1, 11:]).any()


@settings(max_examples=10)
@given(st.lists(st.lists(st.integers(1, 12), min_size=37), min_size=B, max_size=B))
def test_a_packed_row_equals_its_documents(lengths):
    segments = np.stack([np.repeat(np.arange(len(each)), each)[:37] for each in lengths])
    check(inputs("gated delta rule", 37), segments.astype(np.int32), positions_of(37), 8)


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_pieces_continue_the_state(kind):
    *tokens, state = map(
        lambda x: x if x is None else jnp.asarray(x, jnp.float32), inputs(kind, 37)
    )

    @jax.jit
    def recurrence(tokens, positions, state):
        context = ForwardContext(positions, None, Compute(recurrent_chunk=8))
        return linear_recurrence(*tokens, context, state)

    whole, parts = recurrence(tokens, positions_of(37), state), []
    for start, end in ((0, 1), (1, 20), (20, 37)):
        piece = [x if x is None else x[:, start:end] for x in tokens]
        y, state = recurrence(piece, positions_of(end - start), state)
        parts.append(y)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole[0], atol=2e-5)
    np.testing.assert_allclose(state, whole[1], atol=2e-5)


@pytest.mark.parametrize("kind", sentinels(KINDS, landing="gated delta rule".__eq__))
def test_spans_that_are_recomputed_change_nothing(kind, monkeypatch):
    monkeypatch.setattr(chunks, "_SPAN", 32)
    jax.clear_caches()
    check(inputs(kind, 37), SEGMENTS, positions_of(37), 4)
    jax.clear_caches()


@pytest.fixture
def kernels(monkeypatch):
    """The kernels for NVIDIA GPUs, interpreted, also in float32."""
    monkeypatch.setattr(chunks, "platform", lambda: "cuda")
    monkeypatch.setattr(triton_chunks, "_DTYPES", (jnp.float32, jnp.bfloat16))
    jax.clear_caches()
    yield
    jax.clear_caches()


OF_KERNELS = "gated delta rule", "decay of heads"


@pytest.mark.parametrize(
    ("kind", "chunk"),
    sentinels(
        [(kind, chunk) for kind in OF_KERNELS for chunk in (16, 64)],
        [("gated delta rule", 16)].__contains__,
        landing=[("decay of heads", 64)].__contains__,
    ),
)
def test_kernels_for_gpus_compute_the_same(kind, chunk, kernels):
    """The row does not fill its chunks, and the sizes of heads are not multiples of a tile."""
    check(inputs(kind, 37), SEGMENTS, positions_of(37), chunk)
    check(inputs(kind, 37, strong=True), SEGMENTS * 0, positions_of(37, (30, 0)), chunk)


@pytest.mark.landing
def test_equal_keys_take_no_digits_of_kernels(kernels):
    equal = inputs("gated delta rule", 64, equal=True)
    check(equal, np.zeros((B, 64), np.int32), positions_of(64), 64)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_run_where_they_fit(kind, kernels):
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), inputs(kind, 37))
    others = *cotangents(37), SEGMENTS, positions_of(37)
    traced = jax.make_jaxpr(functools.partial(found, chunk=16))(narrow, *others)
    names = set() if KINDS[kind][1] else {"pairs", "outputs", "states", "gradients"}
    assert set(re.findall(r"recurrence_([a-z]+)", str(traced))) == names


@pytest.mark.landing
@pytest.mark.parametrize("kind", OF_KERNELS)
def test_kernels_in_bfloat16_come_within_its_rounding(kind, kernels):
    arrays = inputs(kind, 37)
    narrow = *(jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]), *arrays[3:]
    narrow = jax.tree.map(jnp.asarray, narrow)
    others = *cotangents(37), SEGMENTS, positions_of(37)
    values = found(narrow, *others, chunk=16)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), narrow)
        known = jax.device_get(expected(exact, *others))
    for value, right in zip(*map(jax.tree.leaves, (values, known)), strict=True):
        error = np.linalg.norm(np.asarray(value, np.float64) - right)
        assert error < 0.01 * np.linalg.norm(right)


MESHES = {"context": 4, "tensor": 2}, {"context": 2, "fsdp": 2, "tensor": 2}
SPLIT = [(kind, order, mesh) for kind in KINDS for order in ORDERS for mesh in (0, 1)]


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("kind", "order", "mesh"),
    sentinels(
        SPLIT,
        [("gated delta rule", "zigzag", 0)].__contains__,
        landing=[("decay of channels", "zigzag", 1), ("decay of heads", "plain", 0)].__contains__,
    ),
)
def test_devices_that_share_rows_compute_the_same(kind, order, mesh):
    """Documents cross the borders of devices; pieces have 8 or 16 tokens, chunks 4."""
    S, sizes = 64, MESHES[mesh]
    arrays, cotangent = inputs(kind, S), cotangents(S)
    segments = np.array([[0] * 64, [0] * 20 + [1] * 4 + [2] * 39 + [3]], np.int32)
    if arrays[0].shape[2] == 1:  # a group is repeated for each device along `tensor`
        arrays = *(np.repeat(x, 2, axis=2) for x in arrays[:2]), *arrays[2:]
    with jax.enable_x64(True):
        others = *cotangent, segments, positions_of(S, (99, 22))  # some pieces are only padding
        one = jax.device_get(found(arrays, *others, chunk=4))
        with jax.set_mesh(mesh := make_mesh(**sizes)):
            order_S = places(S, mesh.shape["context"], order)
            of_state, tokens = "batch heads head_dim head_dim", "batch seq"
            decays = HEADS if arrays[3].ndim == 4 else "batch seq heads"
            layouts = (
                (QUERIES, QUERIES, HEADS, decays, "batch seq heads", of_state),
                HEADS,
                of_state,
            )

            def placed(x, layout):
                if x is None:
                    return None
                x = x[:, order_S] if "seq" in layout else x
                return jax.device_put(x, NamedSharding(mesh, partition(layout)))

            given = jax.tree.map(
                placed, (arrays, *others), (*layouts, tokens, tokens), is_leaf=lambda x: x is None
            )
            many = jax.device_get(found(*given, chunk=4, order=order))
    back = np.argsort(order_S)
    for value, right in zip(*map(jax.tree.leaves, (many, one)), strict=True):
        value = value[:, back] if value.shape[1] == S else value
        assert np.abs(value - right).max() <= 1e-12 * np.abs(right).max()
