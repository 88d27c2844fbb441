"""The house is open: a model written outside of lmlib does all that lmlib's own do."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import numpy as np
import pytest
from jaxtyping import Array, Float
from user_model import Learned

from lmlib import Compute, Experiment, batch_loss, describe, make_mesh, whole_rows
from lmlib.checkpoint import Checkpoints
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
from lmlib.models.part import NO_REPORTS, Part
from lmlib.models.weights import initial_values, weight, zeros
from lmlib.optim.adamw import adamw
from lmlib.parallel.layout import sharding, shardings
from lmlib.plan.planner import plan
from lmlib.plan.targets import parse
from lmlib.state import abstract_model

source = Synthetic(vocab_size=64, batch_size=16, sequence_length=32)
make = functools.partial(Learned, vocab=64, embed=32, layers=3, heads=4, positions=32)
MESHES = {"fsdp": {"fsdp": 8}, "all": {"data": 2, "fsdp": 2, "tensor": 2}}


def experiment(mesh, **compute):
    return Experiment(
        model=make,
        data=source,
        optimizer=functools.partial(adamw, peak_lr=1e-2),
        mesh=make_mesh(**mesh),
        steps=20,
        compute=Compute(dtype="float32", **compute),
    )


def reference_logits(model, tokens_BS):
    """As GPT-2 is written down, in float64."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model)
    ((block,),) = weights.stack.patterns

    def normed(x, norm, *layer):
        centred = x - x.mean(-1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.epsilon)
        return unit * norm.scale[layer] + norm.bias[layer]

    def gelu(x):
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))

    x_BSE = weights.tokens_VE[tokens_BS] + weights.positions.table_PE[: tokens_BS.shape[1]]
    S = tokens_BS.shape[1]
    for i in range(block.mlp.up.shape[0]):
        h, attention = normed(x_BSE, block.attention_norm, i), block.attention
        q = np.einsum("bse,ehd->bhsd", h, attention.query[i]) + attention.query_bias[i][:, None]
        k = np.einsum("bse,ehd->bhsd", h, attention.key[i]) + attention.key_bias[i][:, None]
        v = np.einsum("bse,ehd->bhsd", h, attention.value[i]) + attention.value_bias[i][:, None]
        scores = np.where(np.tri(S), q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
        mix = np.exp(scores - scores.max(-1, keepdims=True))
        mix /= mix.sum(-1, keepdims=True)
        x_BSE = x_BSE + np.einsum("bhsd,hde->bse", mix @ v, attention.output[i])
        h = gelu(normed(x_BSE, block.mlp_norm, i) @ block.mlp.up[i] + block.mlp.up_bias[i])
        x_BSE = x_BSE + h @ block.mlp.down[i] + block.mlp.down_bias[i]
    return normed(x_BSE, weights.norm) @ weights.tokens_VE.T


def with_random_biases(model):
    """Biases start at zero, which would hide one that is not added."""
    return jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), model
    )


@pytest.mark.slow
def test_its_logits_are_those_of_the_definition():
    model = jax.jit(lambda: with_random_biases(make(key=jax.random.key(0))))()
    tokens_BS = source.batch(0).tokens

    @jax.jit
    def computed(model, tokens_BS):
        context = whole_rows(tokens_BS, Compute(dtype="float32"))
        features = model.features(model.trunk(tokens_BS, context).x_BSE, context)
        return model.logits(features, context.compute)

    found, expected = computed(model, tokens_BS), reference_logits(model, tokens_BS)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@functools.cache
def initial():
    return jax.jit(make)(key=jax.random.key(1))


@functools.cache
def gradients(mesh_name, sequence_parallel=False):
    mesh = make_mesh(**MESHES.get(mesh_name, {}))
    compute = Compute(dtype="float32", sequence_parallel=sequence_parallel)

    def mean(model, batch):
        return batch_loss(model, batch, compute)[0].minimised / batch.loss_mask.sum()

    model = jax.device_put(initial(), shardings(abstract_model(initial, mesh)))
    with jax.set_mesh(mesh):
        batch = place(source, 0, sharding("batch seq", mesh))
        return jax.device_get(jax.jit(jax.grad(mean))(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_name", "sequence_parallel"), [("fsdp", False), ("all", False), ("all", True)]
)
def test_its_gradients_are_the_same_on_every_mesh(mesh_name, sequence_parallel):
    ours, one = gradients(mesh_name, sequence_parallel), gradients("one")
    whole = np.linalg.norm([np.linalg.norm(leaf) for leaf in jax.tree.leaves(one)])
    for found, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(one), strict=True):
        # That of a key's bias is nothing but rounding: it moves all scores of a query alike.
        bound = 1e-5 * np.linalg.norm(expected) + 1e-8 * whole
        assert np.linalg.norm(found - expected) <= bound


@pytest.mark.slow
@pytest.mark.several_devices
def test_it_trains_and_resumes_bit_for_bit(tmp_path):
    run = experiment(MESHES["all"], sequence_parallel=True)
    run.check()
    step, numbers = run.trace_step().lower().compile(), run.training.hyperparameters
    rows = sharding("batch seq", run.mesh)
    state, losses = run.initial_state(), []
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for i in range(20):
            state, metrics = step(state, place(source, i, rows), numbers)
            losses.append(float(metrics["loss"]))
            if i == 9:
                checkpoints.save(10, state, {})
    assert losses[-1] < losses[0] - 0.2
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        again = checkpoints.restore_newest(run.abstract_state()).state
    for i in range(10, 20):
        again, metrics = step(again, place(source, i, rows), numbers)
        assert float(metrics["loss"]) == losses[i]


@pytest.mark.slow
def test_it_is_planned_described_measured_and_sampled():
    run = experiment({"fsdp": 1})
    described = str(describe(run.recipe.made, run.mesh))
    assert "positions.table_PE" in described and "position 32 × embed 32" in described
    assert {kept.name for kept in saved_activations(run)} >= {"layer_input", "loss_gradient"}
    report = plan(run, parse("cpu:1"))
    assert report.parameters == sum(leaf.size for leaf in jax.tree.leaves(run.recipe.made))
    model = run.initial_state().model
    rows = sharding("batch seq", run.mesh)
    found = layer_statistics(model, place(source, 0, rows), run.mesh, run.compute)
    names = [part.name for part in found.parts]
    assert names == ["tokens", "positions", "layer 0", "layer 1", "layer 2", "norm"]
    assert first_offender(found) is None and "positions" in table(found)
    broken = eqx.tree_at(lambda m: m.norm.bias, model, model.norm.bias * np.nan)
    found = layer_statistics(broken, place(source, 0, rows), run.mesh, run.compute)
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
def test_a_model_that_lacks_a_part_is_told_which(model, message):
    run = dataclasses.replace(experiment({}), model=lambda key: model())
    with pytest.raises(ValueError, match=message):
        run.check()


LONGER = Synthetic(vocab_size=64, batch_size=16, sequence_length=33)
TOO_LONG = "sequences of 33 tokens, but positions.table_PE has 32 positions"


class BiasedByPosition(Part):
    """An mlp with a bias for each position, in every layer a table of its own."""

    bias_PE: Float[Array, "position embed"] = weight(zeros, rules={"position": None})

    def __init__(self, embed, *sizes, key, **more):
        self.bias_PE = initial_values(self, "bias_PE", key, position=32, embed=embed)

    def __call__(self, x_BSE, context):
        return x_BSE + self.bias_PE[context.positions_BS], NO_REPORTS


def test_longer_sequences_than_there_are_positions_are_refused():
    """What does not ask the model's own check also asks here: `make` has no limit in its check."""
    run = experiment({"fsdp": 1})
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
