"""Key and value heads fewer than `tensor`: repeated, exactly, with gradients summed once."""

import functools

import jax
import jax.numpy as jnp
import laid_out
import numpy as np
import pytest
from laid_out import drawn

from lmlib import Compute, describe, llama, make_mesh
from lmlib.data.synthetic import Synthetic
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.weights import creator
from lmlib.parallel.gathering import gather

pytestmark = pytest.mark.several_devices

source = Synthetic(vocab_size=64, batch_size=8, sequence_length=16)
# Biases have the axis of heads too, and norms over all of them; none may count a copy twice.
with_all_parts = functools.partial(
    Attention,
    bias=True,
    norm=functools.partial(RMSNorm, "heads head_dim"),
    key_norm=functools.partial(RMSNorm, "kv_heads head_dim"),
)


def maker(kv_heads, attention=with_all_parts):
    return functools.partial(
        llama, vocab=64, embed=32, layers=1, heads=8, kv_heads=kv_heads, mlp=32,
        attention=attention, key=jax.random.key(3),
    )  # fmt: skip


@functools.cache
def weights(kv_heads):
    return drawn(jax.eval_shape(maker(kv_heads)))


@functools.cache
def loss_and_gradients(kv_heads, sequence_parallel=False, **mesh):
    compute = Compute(dtype="float32", sequence_parallel=sequence_parallel)
    return laid_out.loss_and_gradients(weights(kv_heads), mesh, compute, source)


# Each mesh with each number of heads that it repeats, and with and without sequence parallelism.
CASES = [
    (1, {"tensor": 2}, False),
    (1, {"tensor": 2}, True),
    (1, {"data": 2, "tensor": 4}, False),
    (2, {"data": 2, "tensor": 4}, True),
    (1, {"fsdp": 2, "tensor": 4}, True),
    (2, {"fsdp": 2, "tensor": 4}, False),
    (1, {"tensor": 8}, False),
    (2, {"tensor": 8}, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "mesh", "sequence_parallel"), CASES)
def test_loss_and_gradients_equal_those_of_one_device(kv_heads, mesh, sequence_parallel):
    loss, gradients = loss_and_gradients(kv_heads, sequence_parallel, **mesh)
    expected_loss, expected = loss_and_gradients(kv_heads)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    # A key's bias moves all scores of a query alike, so its gradient is rounding.
    laid_out.assert_near(gradients, expected, least=1e-7)


def test_the_gradient_of_a_head_is_the_sum_of_those_of_its_copies():
    mesh = make_mesh(fsdp=2, tensor=4)
    make = functools.partial(Attention, 32, 8, 2, 4, bias=True, key=jax.random.key(0))
    towards_KD = np.arange(16, dtype=np.float32).reshape(4, 4)  # of four copies
    with jax.set_mesh(mesh):
        gradient = jax.jit(
            jax.grad(lambda one: jnp.sum(gather(one, jnp.float32).key_bias * towards_KD))
        )(creator(make, mesh)())
    expected_KD = towards_KD.reshape(2, 2, 4).sum(1)
    np.testing.assert_array_equal(jax.device_get(gradient.key_bias), expected_KD)


def test_they_are_stored_once_along_tensor():
    mesh = make_mesh(fsdp=2, tensor=4)
    rows = describe(jax.eval_shape(maker(2)), mesh).parameters
    layouts = {row.path.rpartition(".")[2]: row.layout for row in rows}
    assert layouts["key"] == ("whole", "fsdp", "whole", "whole")
    assert layouts["query"] == ("whole", "fsdp", "tensor", "whole")
