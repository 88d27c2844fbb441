"""A model written outside of lmlib does everything that lmlib's own models do."""

import dataclasses
import functools

import equinox as eqx
import jax
import numpy as np
import pytest
from jaxtyping import Array, Float
from outsider_runs import EIGHT, SOURCE, check_outsider, experiment
from user_model import Learned

from lmlib import Compute, describe
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.experiment import DataStage
from lmlib.generate import Generator, generate
from lmlib.inspect import Inspector
from lmlib.inspect.layer_statistics import first_offender, layer_statistics, table
from lmlib.inspect.saved_activations import saved_activations
from lmlib.losses.token_losses import token_losses
from lmlib.models.families.llama import llama
from lmlib.models.model import Model, padded_length
from lmlib.models.part import NO_AUX, Part
from lmlib.models.weights import initial_values, weight, zeros
from lmlib.parallel.layout import sharding
from lmlib.plan.planner import plan
from lmlib.plan.targets import parse

make = functools.partial(Learned, vocab=64, embed=32, layers=3, heads=4, positions=32)


@pytest.mark.slow
@pytest.mark.several_devices
def test_it_trains_as_on_one_device_and_resumes_bit_for_bit(tmp_path):
    compute = Compute(dtype="float32", sequence_parallel=True)
    run_of = functools.partial(experiment, make)
    check_outsider(run_of(EIGHT, compute), run_of({}), tmp_path)


@pytest.mark.slow
def test_it_is_planned_described_measured_and_sampled():
    run = experiment(make, {"fsdp": 1})
    described = describe(run.recipe.abstract_model, run.mesh)
    cells = {each.path: each.cells() for each in described.parameters}
    assert cells["positions.table_PE"][1] == "position 32 × embed 32"
    assert {kept.name for kept in saved_activations(run)} >= {"layer_input", "loss_gradient"}
    report = plan(run, parse("cpu:1"))
    assert report.parameters == sum(
        leaf.size for leaf in jax.tree.leaves(run.recipe.abstract_model)
    )
    model = run.initial_state().model
    rows = sharding("batch seq", run.mesh)
    found = layer_statistics(model, place(SOURCE, 0, rows), run.mesh, run.compute)
    names = [part.name for part in found.parts]
    assert names == ["tokens", "positions", "layer 0", "layer 1", "layer 2", "norm"]
    assert first_offender(found) is None and "positions" in table(found)
    broken = eqx.tree_at(lambda m: m.norm.bias, model, model.norm.bias * np.nan)
    found = layer_statistics(broken, place(SOURCE, 0, rows), run.mesh, run.compute)
    assert first_offender(found) == "the weights of norm"
    ((made,),) = generate(model, [[1, 2, 3]], 5, mesh=run.mesh, compute=Compute(dtype="float32"))
    assert len(made.tokens) == 5


class Half(Model):
    """Has tokens in and features out, and nothing else."""

    vocab = logit_cap = trunk = features = None


class Stranger(eqx.Module):
    trunk = features = vocab = logit_cap = None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Half, r"class Half .*unembedding_EV\W+weight_groups"),
        (Stranger, r"Stranger is not a lmlib.models.model.Model: make it a subclass"),
    ],
)
def test_the_missing_part_of_a_model_is_named(model, message):
    with pytest.raises(ValueError, match=message):
        experiment(lambda key: model(), {}).check()


LONGER = Synthetic(vocab_size=64, batch_size=16, sequence_length=33)
TOO_LONG = "sequences of 33 tokens, but positions.table_PE has 32 positions"


class BiasedByPosition(Part):
    """An mlp with a bias for each position, in every layer a table of its own."""

    bias_PE: Float[Array, "position embed"] = weight(zeros, rules={"position": None})

    def __init__(self, embed, *sizes, key, **more):
        self.bias_PE = initial_values(self, "bias_PE", key, position=32, embed=embed)

    def __call__(self, x_BSE, context):
        return x_BSE + self.bias_PE[context.positions_BS], NO_AUX


def test_longer_sequences_than_there_are_positions_are_refused():
    """Places without the model's own check refuse too; the check of `make` sets no limit."""
    run = experiment(make, {"fsdp": 1})
    model = jax.eval_shape(make, key=jax.random.key(0))
    biased = functools.partial(llama_of_any_length, feed_forward=BiasedByPosition)
    loss = functools.partial(token_losses, compute=run.compute)
    for refused in (
        dataclasses.replace(run, data=LONGER).check,
        dataclasses.replace(run, later_stages=[DataStage(2, LONGER)]).check,
        dataclasses.replace(run, validation=LONGER).check,
        functools.partial(plan, dataclasses.replace(run, data=LONGER), parse("cpu:1")),
        functools.partial(Generator, model, length=33),
        functools.partial(Inspector(model).logits, [1] * 33),
        functools.partial(jax.eval_shape, loss, model, LONGER.batch(0)),
    ):
        with pytest.raises(ValueError, match=TOO_LONG):
            refused()
    with pytest.raises(
        ValueError, match=r"but stack\.patterns\.0\.0\.mlp\.bias_PE has 32 positions"
    ):
        dataclasses.replace(run, model=lambda key: biased(), data=LONGER).check()
    dataclasses.replace(run, model=lambda key: biased()).check()
    assert [padded_length(model, tokens, 20) for tokens in (19, 21, 32, 33)] == [20, 32, 32, 33]
    assert padded_length(jax.eval_shape(llama_of_any_length), 21, 20) == 40


def llama_of_any_length(**parts):
    return llama(vocab=64, embed=32, layers=3, heads=4, mlp=48, key=jax.random.key(0), **parts)
