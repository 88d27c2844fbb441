"""Llama's logits against the equations, in float64."""

import functools
import inspect
import itertools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_reference import reference_logits
from refusals import refusals
from sentinels import sentinels

from lmlib.compute import Compute
from lmlib.models.families.llama import llama
from lmlib.models.families.mistral import mistral
from lmlib.models.families.variants import PARTS
from lmlib.models.forward_context import ForwardContext

V, E, L, H, K, D, F, B, S = 61, 32, 3, 4, 2, 8, 48, 2, 24

make = functools.partial(llama, vocab=V, embed=E, layers=L, heads=H, kv_heads=K, mlp=F)
FLOAT32 = Compute(dtype="float32")


@functools.cache
def initial(seed=0, **settings):
    return jax.jit(functools.partial(make, **settings, key=jax.random.key(seed)))()


@pytest.fixture(scope="module")
def inputs():
    random = np.random.default_rng(0)
    tokens_BS = random.integers(0, V, (B, S)).astype(np.int32)
    segment_ids_BS = np.ones((B, S), np.int32)
    segment_ids_BS[0, 7:] = 2
    segment_ids_BS[0, 20:] = 3
    positions_BS = np.broadcast_to(np.arange(S), (B, S)).copy().astype(np.int32)
    positions_BS[0, 7:20] -= 7
    positions_BS[0, 20:] -= 20
    return jnp.asarray(tokens_BS), jnp.asarray(positions_BS), jnp.asarray(segment_ids_BS)


@functools.partial(jax.jit, static_argnames="compute")
def logits(model, inputs, compute=FLOAT32):
    tokens_BS, positions_BS, segment_ids_BS = inputs
    return model(tokens_BS, ForwardContext(positions_BS, segment_ids_BS, compute))


def as_float64(model):
    return jax.tree.map(lambda weight: np.asarray(weight, np.float64), model)


@pytest.mark.parametrize(
    ("theta", "tied"),
    sentinels(itertools.product((10_000.0, 500_000.0), (False, True)), (500_000.0, False).__eq__),
)
def test_logits_match_the_equations(inputs, tied, theta):
    model = initial(tied=tied, rope_theta=theta)
    # Norm scales start at one, where a misplaced scale would not show.
    random = np.random.default_rng(1)
    model = jax.tree.map(lambda w: w * random.uniform(0.5, 1.5, w.shape).astype(w.dtype), model)
    expected = reference_logits(as_float64(model), *inputs, theta=theta, epsilon=1e-5)
    with jax.default_matmul_precision("highest"):
        found = np.asarray(logits(model, inputs), np.float64)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_without_a_context_a_row_is_one_document(inputs):
    tokens_BS, _, _ = inputs
    model = initial()
    positions_BS = jnp.broadcast_to(jnp.arange(S), (B, S))
    given = ForwardContext(positions_BS, jnp.ones((B, S), jnp.int32), Compute(dtype="float32"))
    np.testing.assert_array_equal(model(tokens_BS), model(tokens_BS, given))


@pytest.mark.slow
def test_compute_dtype_is_that_of_the_residual_stream(inputs):
    model = initial()
    tokens_BS, positions_BS, segment_ids_BS = inputs

    def dtype_of_trunk(compute):
        return model.trunk(
            tokens_BS, ForwardContext(positions_BS, segment_ids_BS, compute)
        ).x_BSE.dtype

    assert dtype_of_trunk(FLOAT32) == jnp.float32
    assert dtype_of_trunk(Compute()) == jnp.bfloat16
    narrow = logits(model, inputs, Compute())
    assert narrow.dtype == jnp.float32
    assert all(weight.dtype == jnp.float32 for weight in jax.tree.leaves(model))
    np.testing.assert_allclose(narrow, logits(model, inputs), atol=0.1)


@pytest.mark.parametrize(("settings", "message"), refusals(__file__, "sizes"))
def test_impossible_sizes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings, key=jax.random.key(0))


@pytest.mark.parametrize(("settings", "message"), refusals(__file__, "compute"))
def test_impossible_ways_to_compute_are_named(settings, message):
    model = jax.eval_shape(functools.partial(make, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=message):
        model.check(S, Compute(**settings))


def test_a_variant_has_the_parameters_of_its_family_but_for_those_it_names():
    own = dict(inspect.signature(mistral).parameters)
    theirs = dict(inspect.signature(llama).parameters)
    without = ["rope_scaling", "rotary_fraction", *PARTS.split()]
    assert [*own] == [name for name in theirs if name not in without]
    assert own.pop("window").default == 4_096
    assert all(parameter == theirs[name] for name, parameter in own.items())
    with pytest.raises(TypeError, match="rotary_fraction"):
        fdl.Partial(mistral, rotary_fraction=0.5)
    sizes = {"vocab": V, "embed": E, "layers": L, "heads": H, "mlp": F}
    with pytest.raises(TypeError, match="rotary_fraction"):
        mistral(**sizes, rotary_fraction=0.5, key=jax.random.key(0))


@pytest.mark.slow
def test_the_arguments_of_a_variant_come_by_name_or_by_place():
    key = jax.random.key(0)
    expected = initial(kv_heads=None, window=4_096)
    for model in (mistral(V, E, L, H, F, key=key), mistral(V, E, L, heads=H, mlp=F, key=key)):
        jax.tree.map(np.testing.assert_array_equal, model, expected)
