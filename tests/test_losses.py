"""Cross-entropy and z-loss against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from lmlib.losses import loss_sums
from lmlib.parallel.layout import partition
from lmlib.parallel.mesh import make_mesh


def reference(logits_BSV, targets_BS, mask_BS):
    logits_BSV = np.asarray(logits_BSV, np.float64)
    cross_entropy = z = 0.0
    for b, s in np.argwhere(mask_BS):
        log_z = np.log(np.exp(logits_BSV[b, s] - logits_BSV[b, s].max()).sum())
        log_z += logits_BSV[b, s].max()
        cross_entropy += log_z - logits_BSV[b, s, targets_BS[b, s]]
        z += log_z**2
    return cross_entropy, z


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 80.0), st.floats(0, 1))
def test_sums_match_float64(seed, scale, share):
    random = np.random.default_rng(seed)
    logits_BSV = (random.normal(size=(3, 5, 17)) * scale).astype(np.float32)
    targets_BS = random.integers(0, 17, (3, 5)).astype(np.int32)
    mask_BS = random.random((3, 5)) < share
    found = loss_sums(jnp.asarray(logits_BSV), jnp.asarray(targets_BS), jnp.asarray(mask_BS))
    expected = reference(logits_BSV, targets_BS, mask_BS)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("mesh", [{"tensor": 8}, {"fsdp": 2, "tensor": 4}])
def test_a_split_vocabulary_changes_nothing(mesh):
    random = np.random.default_rng(0)
    logits_BSV = random.normal(size=(4, 6, 32)).astype(np.float32) * 5
    targets_BS = random.integers(0, 32, (4, 6)).astype(np.int32)
    mask_BS = random.random((4, 6)) < 0.7
    mesh = make_mesh(**mesh)

    def put(array, axes):
        return jax.device_put(array, NamedSharding(mesh, partition(axes)))

    with jax.set_mesh(mesh):
        logits = put(logits_BSV, "batch seq vocab")
        rest = put(targets_BS, "batch seq"), put(mask_BS, "batch seq")
        found = jax.jit(loss_sums)(logits, *rest)
        gradient = jax.jit(jax.grad(lambda x: loss_sums(x, *rest).cross_entropy))(logits)
    np.testing.assert_allclose(found, reference(logits_BSV, targets_BS, mask_BS), rtol=2e-6)
    assert gradient.sharding == logits.sharding
    shifted = np.exp(logits_BSV - logits_BSV.max(-1, keepdims=True))
    expected = shifted / shifted.sum(-1, keepdims=True) - np.eye(32)[targets_BS]
    np.testing.assert_allclose(gradient, expected * mask_BS[..., None], atol=2e-6)


def test_masked_positions_have_no_gradient_even_with_infinite_logits():
    logits_BSV = jnp.zeros((1, 2, 4)).at[0, 1, 2].set(jnp.inf)
    mask_BS = jnp.array([[True, False]])
    gradient = jax.grad(
        lambda x: loss_sums(x, jnp.zeros((1, 2), jnp.int32), mask_BS).cross_entropy
    )(logits_BSV)
    assert np.isfinite(gradient[0, 0]).all()
