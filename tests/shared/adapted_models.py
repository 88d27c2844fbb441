"""Small golden models with adapters that are not zero, and their logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from golden_models import FLOAT32, golden_model, logits
from hugging_face_families import PROMPT

from lmlib.adapters.lora import merged, with_adapters
from lmlib.parallel.axes import map_weights

base_of = golden_model
merge = jax.jit(merged)


def assert_same_logits(model, ids, expected, kept=slice(None), bound=1e-5):
    with jax.default_matmul_precision("highest"):
        found = np.asarray(logits(model, np.asarray(ids, np.int32), FLOAT32))[0, kept]
    assert np.abs(found - expected).max() <= bound * np.abs(expected).max()


@functools.cache
def adapted(name, **settings):
    """Returns the model with random adapters, by default on all that PEFT can adapt."""
    key, usual = (
        jax.random.key(1),
        "*attention*" if name.startswith(("deepseek", "qwen3_next")) else "stack.*",
    )
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


def ids_of(name):
    return np.random.default_rng(1).integers(0, base_of(name).vocab, (1, PROMPT))


def theirs(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)).logits[0].numpy()
