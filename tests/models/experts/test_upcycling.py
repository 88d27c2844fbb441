"""An upcycled model has copies of the dense one's MLPs, and computes the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import laid_out

from lmlib import Compute, single_document_context
from lmlib.adapters.lora import with_adapters
from lmlib.models.differences import differences
from lmlib.models.experts.upcycling import upcycle, upcycled
from lmlib.models.families.experts.mixtral import mixtral
from lmlib.models.families.gemma import gemma2
from lmlib.models.families.gpt2 import gpt2
from lmlib.models.families.llama import llama
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.ungated_mlp import gelu
from lmlib.parallel.layout import shardings
from lmlib.parallel.mesh import make_mesh
from lmlib.state import abstract_model

SIZES = {"vocab": 61, "embed": 16, "layers": 4, "heads": 4, "mlp": 24}
KEY, ROUTERS = jax.random.key(0), jax.random.key(7)
TOKENS_BS = jax.random.randint(jax.random.key(1), (2, 40), 0, 61)


def logits(model, dtype):
    context = single_document_context(TOKENS_BS, Compute(dtype=dtype))
    return np.asarray(jax.jit(lambda model: model(TOKENS_BS, context))(model), np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    [
        (llama, "float32", 1e-6),
        (llama, "bfloat16", 2**-6),
        (gemma2, "float32", 1e-6),
    ],
)
def test_it_computes_the_same_as_the_dense_model(family, dtype, bound):
    dense = family(**SIZES, key=KEY)
    mixture = upcycle(dense, experts=5, top=3, key=ROUTERS)
    expected = logits(dense, dtype)
    assert np.abs(logits(mixture, dtype) - expected).max() <= bound * np.abs(expected).max()


@pytest.mark.slow
def test_experts_are_copies_and_routers_are_new():
    dense = llama(**SIZES, key=KEY)
    mixture = upcycle(dense, experts=3, top=2, key=ROUTERS)
    mlp, made = dense.stack.patterns[0][0].mlp, mixture.stack.patterns[0][0].mlp
    for name in ("gate", "up", "down"):
        own, copies = getattr(mlp, name), getattr(made.experts, name)
        for expert in range(3):
            np.testing.assert_array_equal(copies[:, expert], own)
    np.testing.assert_array_equal(mixture.embedding, dense.embedding)
    routers = made.router.logits
    assert len(np.unique(routers)) > 0.99 * routers.size  # every layer and every expert has its own
    assert float(jnp.std(routers)) == pytest.approx(16**-0.5, rel=0.15)
    again, other = (upcycle(dense, 3, 2, key=key) for key in (ROUTERS, KEY))
    np.testing.assert_array_equal(again.stack.patterns[0][0].mlp.router.logits, routers)
    assert not np.array_equal(other.stack.patterns[0][0].mlp.router.logits, routers)


def test_a_llama_becomes_a_mixtral():
    made, family = (
        jax.eval_shape(functools.partial(make, experts=4, top=2), key=KEY)
        for make in (
            functools.partial(upcycled, functools.partial(llama, **SIZES)),
            functools.partial(mixtral, **SIZES, rope_theta=1e4),
        )
    )
    assert not list(differences(made, family))


@pytest.mark.slow
@pytest.mark.several_devices
def test_on_a_mesh_it_is_the_same_and_experts_are_split():
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    make = functools.partial(upcycle, experts=4, key=ROUTERS)
    dense = llama(**SIZES | {"vocab": 64}, key=KEY)
    expected = make(dense)
    layout = shardings(abstract_model(lambda: expected, mesh))
    made = jax.jit(make, out_shardings=layout)(laid_out(dense, mesh))
    jax.tree.map(np.testing.assert_array_equal, made, expected)
    gate = made.stack.patterns[0][0].mlp.experts.gate
    assert gate.addressable_shards[0].data.size * 8 == gate.size


def test_a_single_expert_of_a_token_is_refused():
    with pytest.raises(ValueError, match=r"top must be at least 2, got 1: .* no gradient"):
        jax.eval_shape(lambda key: upcycle(llama(**SIZES, key=key), 4, 1, key=key), KEY)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (functools.partial(mixtral, **SIZES, experts=4), "a mixture of experts already"),
        (functools.partial(gpt2, positions=64, **SIZES), "no gated mlps"),
        (
            functools.partial(
                llama, **SIZES, feed_forward=functools.partial(GatedMLP, activation=gelu)
            ),
            "have gelu, and experts one of silu, gelu_tanh",
        ),
        (lambda key: with_adapters(llama(**SIZES, key=key), key=key), "merge them first"),
    ],
)
def test_models_that_cannot_be_upcycled_are_refused(make, told):
    with pytest.raises(ValueError, match=told):
        jax.eval_shape(lambda key: upcycle(make(key=key), key=key), KEY)
