"""How full experts were stays out of folders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmlib import hf
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.llama import llama


def mixture(balance, key):
    router = functools.partial(Router, balance=balance)
    experts = functools.partial(Mixture, experts=4, top=2, router=router)
    return llama(
        vocab=64, embed=16, layers=2, heads=2, kv_heads=1, mlp=8, feed_forward=experts, key=key
    )


@pytest.mark.slow
def test_a_model_balanced_over_batches_leaves_as_one_that_routes_alike(tmp_path):
    model = mixture("batch", jax.random.key(0))
    hf.save(model, tmp_path / "out")
    read = hf.load(tmp_path / "out")
    assert jax.tree.structure(read) == jax.tree.structure(mixture("row", jax.random.key(0)))
    tokens_BS = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)
    np.testing.assert_array_equal(read(tokens_BS), model(tokens_BS))
