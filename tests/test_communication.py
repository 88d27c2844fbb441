"""Weights are gathered in bfloat16, layer by layer, and dropout sends nothing.

tests/plan/test_communication_budgets.py counts every array that a step sends. XLA's CPU backend
widens bf16 collectives to float32, so dtypes are read off the lowered program.
"""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from lmlib.compute import Compute
from lmlib.losses.next_token import NextToken, batch_loss
from lmlib.models.families.llama import llama
from lmlib.parallel.axes import map_weights
from lmlib.parallel.layout import reshard
from lmlib.parallel.mesh import make_mesh
from lmlib.state import abstract_batch, abstract_model

pytestmark = pytest.mark.several_devices

L, V, E, F, H, K, D = 3, 160, 64, 96, 8, 4, 8
B, S = 16, 32
DATA = 4  # devices that share the batch, and each weight's `embed` axis
TENSOR = 2
make = functools.partial(
    llama, vocab=V, embed=E, layers=L, heads=H, kv_heads=K, mlp=F, key=jax.random.key(0)
)


@functools.cache
def lowered(loss=batch_loss, mesh=None, **settings):
    mesh = mesh or make_mesh(fsdp=DATA, tensor=TENSOR)
    model, compute = abstract_model(make, mesh), Compute(**settings)

    def scalar(model, batch):
        sums, _ = loss(model, batch, compute)
        return sums.loss_sum

    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(scalar)).lower(model, abstract_batch(B, S, mesh))


@functools.cache
def compiled_text(program):
    return program.compile().as_text()


def compiled_collectives(program, kind):
    """The shape of each array that a collective of `kind` results in."""
    results = re.findall(rf" = (.*?) {kind}(?:-start)?\(", compiled_text(program))
    shapes = (shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result))
    return [tuple(int(n) for n in shape.split(",") if n) for shape in shapes]


def moves(program):
    """(shape, dtype, layout) of every layout that the lowered program asks for."""
    pattern = r"sdy\.sharding_constraint \S+ <@mesh, \[(.*?)\]> : tensor<((?:\d+x)*)(\w+)>"
    for layout, shape, dtype in re.findall(pattern, program.as_text()):
        yield tuple(int(n) for n in shape.split("x") if n), dtype, layout


def gathered_stacks(program):
    """Moves of whole layer stacks to a layout without fsdp."""
    model = jax.eval_shape(make)
    stacks = {leaf.shape for leaf in jax.tree.leaves(model.stack)}
    return [
        (shape, dtype)
        for shape, dtype, layout in moves(program)
        if shape in stacks and '"fsdp"' not in layout
    ]


def test_each_layer_is_gathered_in_bfloat16_inside_the_scan():
    program = lowered()
    per_layer = Counter({leaf.shape[1:]: 0 for leaf in jax.tree.leaves(jax.eval_shape(make).stack)})
    for shape, dtype, layout in moves(program):
        if shape in per_layer and '"fsdp"' not in layout and dtype == "bf16":
            per_layer[shape] += 1
    # Once in the forward scan, once where the backward scan computes the layer again; the
    # cotangents are constrained to the same layout before they are reduced.
    for shape, count in per_layer.items():
        assert count >= 2, shape
    assert not gathered_stacks(program)


@pytest.mark.slow
def test_a_gathered_stack_would_be_seen():
    def gathers_everything_first(model, batch, compute):
        def gathered(weight, array):
            return jnp.sum(reshard(array.astype(jnp.bfloat16), weight.axes))

        sums, observed = batch_loss(model, batch, compute)
        whole = jax.tree.leaves(map_weights(gathered, model.stack))
        return sums._replace(loss_sum=sums.loss_sum + sum(whole)), observed

    assert len(gathered_stacks(lowered(gathers_everything_first))) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_sends_nothing_and_draws_where_the_activations_lie(sequence_parallel):
    def with_dropout(model, batch, compute):
        return batch_loss(model, batch, compute, NextToken(dropout=0.1), jax.random.key(0))

    plain = lowered(sequence_parallel=sequence_parallel)
    program = lowered(with_dropout, sequence_parallel=sequence_parallel)
    any_kind = "(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    sent, expected = (
        Counter(tuple(sorted(shape)) for shape in compiled_collectives(each, any_kind))
        for each in (program, plain)
    )
    assert sent == expected
    text = compiled_text(program)
    assert f"pred[{B // DATA},{S // TENSOR if sequence_parallel else S},{E}]" in text
    assert f"[{B},{S},{E}]" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"expert": 8}, {"data": 8}, {"tensor": 4}]
)
def test_gathers_follow_fsdp_and_expert_alone(mesh):
    gathered = compiled_collectives(lowered(mesh=make_mesh(**mesh)), "all-gather")
    stacks = {leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(make).stack)}
    assert not stacks.intersection(gathered)
    assert bool(gathered) == ("fsdp" in mesh or "expert" in mesh)
