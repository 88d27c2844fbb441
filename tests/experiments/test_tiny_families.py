"""Tiny families: trained on a mesh of 8, resumed, sampled from, quantized and planned."""

import functools

import fiddle as fdl
import jax
import numpy as np
import pytest
from states import assert_same_bits, cut_short

from lmlib import Compute
from lmlib.data.batch import place
from lmlib.generate import generate
from lmlib.parallel.layout import sharding, shardings
from lmlib.plan.planner import plan
from lmlib.plan.targets import parse
from runner import fit
from runner.aot.abstract_inputs import built
from runner.config import configs

pytestmark = pytest.mark.slow
MESH = ("mesh.fsdp=4", "mesh.tensor=2", "compute.sequence_parallel=True")
# Gated or plain mlps, patterns of layers or one kind, with and without biases and norms of queries.
KINDS = ("llama_3_2_1b", "gemma3_1b", "gpt2_124m")
QUANTIZED = "compute.quantized={'projections': 'int8', 'mlp': 'int8'}"


def tiny(name, *overrides):
    settings = ["steps=6", "checkpoints.every=3", "validation=None", "optimizer.peak_lr=1e-2"]
    return configs.load(
        f"experiments/{name}", ["tiny"], [*settings, "compute.dtype=float32", *overrides]
    )


def losses(result):
    return [line["loss"] for line in result.metrics]


@functools.cache
def initial(name):
    """The model before the first step, of which every run takes a copy."""
    return jax.device_get(fdl.build(tiny(name, "mesh.fsdp=1")).initial_state().model)


def losses_of_steps(name, *overrides):
    """As `losses`, of the run's steps alone, without its files."""
    experiment = fdl.build(tiny(name, *overrides))
    rows = sharding("batch seq", experiment.mesh)
    layout = shardings(experiment.abstract_state().model)
    state = experiment.initial_state(jax.device_put(initial(name), layout, may_alias=False))
    step, found = experiment.trace_step().lower().compile(), []
    for number in range(experiment.steps):
        state, metrics = step(
            state, place(experiment.data, number, rows), experiment.training.hyperparameters
        )
        found.append(float(metrics["loss"]))
    return found


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """The family's name, the run's folder, and what it left."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, fit(tiny(request.param, *MESH), folder / "whole")


def test_it_learns_on_a_mesh_as_it_does_alone(trained):
    name, _, result = trained
    found = losses(result)
    np.testing.assert_allclose(found, losses_of_steps(name, "mesh.fsdp=1"), rtol=1e-4)
    assert found[-1] < found[0]


def test_it_goes_on_from_a_checkpoint_to_the_same_bits(trained):
    name, folder, result = trained
    again = fit(tiny(name, *MESH), cut_short(folder / "whole", 3, folder / "parted"))
    assert_same_bits(again.state, result.state)


def test_quantized_it_learns_nearly_the_same(trained):
    name, _, result = trained
    rounded = losses_of_steps(name, *MESH, QUANTIZED)
    assert rounded != losses(result)
    np.testing.assert_allclose(rounded, losses(result), rtol=2e-2)


def test_it_continues_a_text(trained):
    model = trained[2].state.model
    mesh = jax.tree.leaves(model)[0].sharding.mesh
    made = generate(model, [[3, 1, 4], [1]], 4, mesh=mesh, compute=Compute(dtype="float32"))
    assert [len(each.tokens) for (each,) in made] == [4, 4]
    assert all(0 <= token < 512 for (each,) in made for token in each.tokens)


@pytest.mark.parametrize("name", KINDS)
def test_it_is_planned(name):
    target = parse("cpu:8")
    report = plan(built(tiny(name, *MESH), target.devices()), target)
    model = jax.eval_shape(lambda: fdl.build(tiny(name).model)(key=jax.random.key(0)))
    assert report.parameters == sum(leaf.size for leaf in jax.tree.leaves(model))
    assert report.memory.parameters < 4 * report.parameters
