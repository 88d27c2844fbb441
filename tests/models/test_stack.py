"""The scan over layers: patterns, caches and losses of blocks, in the order of the layers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float
from laid_out import assert_near, loss_and_gradients

from lmlib import Compute, batch_loss, llama, single_document_context
from lmlib.compute import EVERYTHING
from lmlib.data.synthetic import Synthetic
from lmlib.models.block import Block
from lmlib.models.part import AuxOutputs, Part
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.stack import Segment, Stack
from lmlib.models.weights import fan_in, fold_in_name, initial_values, weight

MESHES = ({}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
source = Synthetic(vocab_size=32, batch_size=8, sequence_length=16)


@functools.cache
def model_of(layers: int):
    return llama(vocab=32, embed=16, layers=layers, heads=2, mlp=16, key=jax.random.key(0))


def gradients(layers: int, mesh: dict[str, int], **compute: Any):
    compute = Compute(dtype="float32", **compute)
    return loss_and_gradients(model_of(layers), mesh, compute, source)[1]


@pytest.mark.landing
@pytest.mark.parametrize("unroll", [1, 2])
def test_a_loop_keeps_no_copy_of_the_weights(unroll):
    model = jax.eval_shape(
        lambda: llama(vocab=32, embed=64, layers=4, heads=2, mlp=4096, key=jax.random.key(0))
    )
    one_row = Synthetic(vocab_size=32, batch_size=1, sequence_length=16)
    batch, compute = jax.tree.map(jnp.asarray, one_row.batch(0)), Compute(unroll=unroll)
    gradient = jax.grad(lambda model: batch_loss(model, batch, compute)[0].loss_sum)
    compiled = jax.jit(gradient).lower(model).compile()
    weights = sum(4 * each.size for each in jax.tree.leaves(model))
    assert compiled.memory_analysis().temp_size_in_bytes < 0.75 * weights


expected_gradients = functools.cache(lambda layers: gradients(layers, {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "unroll", "kept", "mesh", "sequence_parallel"),
    [
        (1, 6, {"saved": ("query", "mlp_up")}, MESHES[1], False),
        (4, 4, {"saved": ("mlp_gate", "mlp_hidden", "value")}, MESHES[0], False),
        (5, 1, {"saved": EVERYTHING}, MESHES[1], True),
        (5, 2, {"saved": ("attention_input", "mlp_input")}, MESHES[1], True),
        (5, 6, {"saved": ("attention",)}, MESHES[2], True),
        (4, 1, {"offloaded": ("attention", "mlp_gate")}, MESHES[0], False),
        (4, 1, {"saved": ("query",), "offloaded": ("mlp_up",)}, MESHES[0], False),
    ],
)
def test_layers_with_and_without_a_loop_have_the_same_gradients(
    layers, unroll, kept, mesh, sequence_parallel
):
    found = gradients(layers, mesh, unroll=unroll, sequence_parallel=sequence_parallel, **kept)
    assert_near(found, expected_gradients(layers))


class TokenShift(Part):
    """A mixer with a cache: each position gets the one before it; the cache is the last one."""

    shifted: Float[Array, "embed embed"] = weight(fan_in("embed"))

    def __call__(self, x_BSE, context, cache=None):
        before_B1E = jnp.zeros_like(x_BSE[:, :1]) if cache is None else cache
        shifted_BSE = jnp.concatenate([before_B1E, x_BSE], axis=1)[:, :-1]
        y_BSE = jnp.einsum("bse,ef->bsf", shifted_BSE, self.shifted)
        return y_BSE, x_BSE[:, -1:]


class CostlyMLP(Part):
    """An mlp that adds to the loss, as a router does."""

    inner: GatedMLP

    def __call__(self, x_BSE, context):
        y_BSE, _ = self.inner(x_BSE, context)
        return y_BSE, AuxOutputs({"squares": jnp.sum(jnp.square(y_BSE))}, {})


E = 8


def shifting(key):
    norm = RMSNorm(embed=E, key=key)
    mixer = TokenShift(initial_values(TokenShift, "shifted", key, embed=E))
    return Block(mixer, CostlyMLP(GatedMLP(E, 12, key=fold_in_name(key, "mlp"))), norm, norm)


def plainer(key):
    whole = shifting(key)
    return Block(whole.attention, whole.mlp, mlp_norm=whole.mlp_norm)


@pytest.fixture(scope="module")
def stack():
    """Three times (shifting, plainer), then two plainer: eight layers."""
    segments = [Segment([shifting, plainer], 3), Segment([plainer], 2)]
    return jax.jit(lambda: Stack(segments, jax.random.key(0)))()


def inputs(S=6):
    x_BSE = jax.random.normal(jax.random.key(1), (2, S, E))
    return x_BSE, single_document_context(jnp.zeros((2, S), jnp.int32), Compute(dtype="float32"))


def blocks_in_order(stack):
    for pattern in stack.patterns:
        for repetition in range(jax.tree.leaves(pattern)[0].shape[0]):
            for block in pattern:
                yield jax.tree.map(lambda leaf, i=repetition: leaf[i], block)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [1, 2, 8])
def test_patterns_run_in_the_order_of_their_layers(stack, unroll):
    x_BSE, context = inputs()
    context = dataclasses.replace(
        context,
        compute=dataclasses.replace(context.compute, unroll=unroll),
        observe=lambda layer: (jnp.sum(layer.before), jnp.sum(layer.after)),
    )
    found = jax.jit(lambda stack: stack(x_BSE, context))(stack)
    sums, cost = [jnp.sum(x_BSE)], 0.0
    for block in blocks_in_order(stack):
        x_BSE, aux, _ = block(x_BSE, context)
        sums.append(jnp.sum(x_BSE))
        cost += aux.losses["squares"]
    assert stack.depth == 8 == len(sums) - 1
    np.testing.assert_allclose(found.x_BSE, x_BSE, rtol=1e-5, atol=1e-5)
    before, after = found.observed
    np.testing.assert_allclose(before, np.array(sums[:-1]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after, np.array(sums[1:]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.aux.losses["squares"], cost / 8, rtol=1e-5)


@pytest.mark.slow
def test_a_cache_goes_on_where_the_last_call_ended(stack):
    x_BSE, context = inputs()
    whole = stack(x_BSE, context).x_BSE
    cache = tuple(
        tuple(jnp.zeros((jax.tree.leaves(block)[0].shape[0], 2, 1, E)) for block in pattern)
        for pattern in stack.patterns
    )
    pieces = []
    for start, end in ((0, 1), (1, 4), (4, 6)):
        part = stack(x_BSE[:, start:end], inputs(end - start)[1], cache)
        pieces.append(part.x_BSE)
        cache = part.cache
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_parts_know_their_layers(stack):
    layers = [list(part.layers) for part in stack.weight_groups()]
    assert layers == [[0, 2, 4], [1, 3, 5], [6, 7]]
    for part in stack.weight_groups():
        for leaf in jax.tree.leaves(part.weights):
            assert leaf.shape[0] == len(part.layers)


@pytest.mark.slow
def test_a_layers_weights_depend_on_its_index_alone(stack):
    other = jax.jit(lambda: Stack([Segment([plainer], 8)], jax.random.key(0)))()
    for one, two in zip(blocks_in_order(stack), blocks_in_order(other), strict=True):
        np.testing.assert_array_equal(one.attention.shifted, two.attention.shifted)
