"""Small golden models with adapters that are not zero, and what they compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hugging_face_families import GOLDEN

from lmlib import Compute, hf, whole_rows
from lmlib.adapters import with_adapters
from lmlib.parallel.axes import map_weights

FLOAT32 = Compute(dtype="float32")
PROMPT = 300


@functools.cache
def base_of(name):
    return hf.load(GOLDEN / name)


@jax.jit
def logits(model, ids):
    return model(ids, whole_rows(ids, FLOAT32))


def assert_same_logits(model, ids, expected, kept=slice(None)):
    with jax.default_matmul_precision("highest"):
        found = np.asarray(logits(model, jnp.asarray(ids, jnp.int32)))[0, kept]
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def adapted(name, **settings):
    """Of all that PEFT can adapt, unless `paths` say otherwise, with adapters that change what the
    model computes, but not its scale."""
    key, usual = jax.random.key(1), "*attention*" if name.startswith("deepseek") else "stack.*"
    settings = {"paths": (usual,)} | settings
    base = base_of(name)
    weights, random = dict[str, jax.Array](), np.random.default_rng(1)
    map_weights(lambda weight, array: weights.update({weight.path: array}), base)

    def value(weight, shape):
        found = weights.get(weight.path.removesuffix(".base"))
        if found is not None:
            return found
        return jnp.asarray(random.normal(0.0, 0.1, shape.shape), shape.dtype)

    return map_weights(value, jax.eval_shape(lambda: with_adapters(base, **settings, key=key)))


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def ids_of(name):
    return np.random.default_rng(1).integers(0, base_of(name).vocab, (1, PROMPT))


def theirs(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)).logits[0].numpy()
