"""What `Inspector` shows, against Llama's equations in float64; of other families
tests/hf/test_parity.py compares it with transformers."""

import functools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import Bigram
from llama_reference import reference_logits

from lmlib import Inspector, llama, make_mesh
from lmlib.parallel.layout import shardings
from lmlib.state import abstract_model

IDS = [int(id) for id in np.random.default_rng(0).integers(0, 64, 24)]
make = functools.partial(
    llama, vocab=64, embed=32, layers=3, heads=4, kv_heads=2, mlp=48, key=jax.random.key(0)
)


@functools.cache
def initial():
    return jax.jit(make)()


SLOW = [pytest.mark.several_devices, pytest.mark.slow]


@pytest.fixture(scope="module", params=["no mesh", pytest.param("eight devices", marks=SLOW)])
def model(request):
    if request.param == "no mesh":
        return initial()
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    return jax.device_put(initial(), shardings(abstract_model(make, mesh)))


@pytest.fixture(scope="module")
def inspector(model):
    return Inspector(model)  # which finds the mesh by itself


@pytest.fixture(scope="module")
def expected():
    weights = jax.tree.map(lambda w: np.asarray(w, np.float64), initial())
    seen, row = defaultdict(list), np.zeros((1, len(IDS)), int)
    positions = np.arange(len(IDS))[None]
    (logits,) = reference_logits(weights, [IDS], positions, row, 10_000.0, 1e-5, seen=seen)
    found = {"logits": logits, **{name: np.stack(each) for name, each in seen.items()}}
    x_DSE = found["activations"]
    normed_DSE = x_DSE / np.sqrt((x_DSE**2).mean(-1, keepdims=True) + 1e-5) * weights.norm.scale
    return {**found, "logit_lens": normed_DSE @ weights.unembedding}


@pytest.mark.parametrize("what", ["logits", "activations", "attention", "logit_lens"])
def test_results_follow_the_equations(inspector, expected, what):
    found = getattr(inspector, what)(IDS)
    assert type(found) is np.ndarray and found.dtype == np.float32
    assert found.shape == expected[what].shape
    np.testing.assert_allclose(found, expected[what], rtol=1e-4, atol=2e-5)


def test_a_tokens_loss_is_minus_its_log_probability(inspector, expected):
    logits = expected["logits"][:-1]
    log_z = np.log(np.exp(logits).sum(-1))
    nats = log_z - logits[np.arange(len(IDS) - 1), IDS[1:]]
    np.testing.assert_allclose(inspector.token_losses(IDS), nats, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_model_is_called_without_setting_its_mesh(model, expected):
    tokens_BS = jnp.array([IDS] * 4, jnp.int32)
    found = np.asarray(model(tokens_BS), np.float32)
    np.testing.assert_allclose(found, [expected["logits"]] * 4, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("ids", "message"), [([], "no tokens"), ([3, 64], "no token 64: its ids end at 63")]
)
def test_invalid_sequences_are_refused(inspector, ids, message):
    with pytest.raises(ValueError, match=message):
        inspector.logits(ids)


def test_a_model_without_layers_says_so():
    with pytest.raises(ValueError, match="Bigram does not expose its layers"):
        Inspector(Bigram(64, 8, key=jax.random.key(0))).activations(IDS)
