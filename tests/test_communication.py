"""A step's communication between devices, read from the program before XLA optimises it.

tests/plan/test_communication_budgets.py counts what compiled programs send. XLA's CPU backend
widens bf16 collectives to float32, so dtypes are read off the lowered program.
"""

import functools
import re

import jax
import pytest

from lmlib.compute import Compute
from lmlib.losses.next_token import batch_loss
from lmlib.models.families.llama import llama
from lmlib.parallel.mesh import make_mesh
from lmlib.state import abstract_batch, abstract_model

make = functools.partial(
    llama, vocab=160, embed=64, layers=3, heads=8, kv_heads=4, mlp=96, key=jax.random.key(0)
)


def moves(program):
    """(shape, dtype, layout) of every layout that the lowered program asks for."""
    pattern = r"sdy\.sharding_constraint \S+ <@mesh, \[(.*?)\]> : tensor<((?:\d+x)*)(\w+)>"
    for layout, shape, dtype in re.findall(pattern, program.as_text()):
        yield tuple(int(n) for n in shape.split("x") if n), dtype, layout


def lowered(**sizes):
    mesh = make_mesh(**sizes)

    def loss(model, batch):
        return batch_loss(model, batch, Compute())[0].loss_sum

    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss))
        return step.lower(abstract_model(make, mesh), abstract_batch(16, 32, mesh))


stacks = {leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(make).stack)}


@pytest.mark.several_devices
def test_each_layer_is_gathered_in_bfloat16_inside_the_scan():
    program = lowered(fsdp=4, tensor=2)
    gathered = [(shape, dtype) for shape, dtype, layout in moves(program) if '"fsdp"' not in layout]
    # Once in the forward scan, once where the backward scan computes the layer again; the
    # cotangents are constrained to the same layout before they are reduced.
    for shape in stacks:
        assert gathered.count((shape[1:], "bf16")) >= 2, shape
    assert not [shape for shape, _ in gathered if shape in stacks]


@pytest.mark.slow
@pytest.mark.several_devices
@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"expert": 8}, {"data": 8}, {"tensor": 4}]
)
def test_gathers_follow_fsdp_and_expert_alone(mesh):
    """The compiled program never gathers a whole stack."""
    results = re.findall(r" = (.*?) all-gather(?:-start)?\(", lowered(**mesh).compile().as_text())
    shapes = (shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result))
    gathered = [tuple(int(n) for n in shape.split(",") if n) for shape in shapes]
    assert not stacks.intersection(gathered)
    assert bool(gathered) == ("fsdp" in mesh or "expert" in mesh)
