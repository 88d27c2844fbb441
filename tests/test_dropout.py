"""Dropout in training depends on seed, step and microbatch, and on nothing else."""

import dataclasses
import functools
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import Bigram
from laid_out import drawn, first_state
from llama_reference import reference_logits
from states import assert_same_bits

from lmlib import train
from lmlib.compute import EVERYTHING, Compute
from lmlib.data.batch import place
from lmlib.data.synthetic import Synthetic
from lmlib.evaluate.validation import Evaluator
from lmlib.generate import GREEDY, generate
from lmlib.inspect.layer_statistics import layer_statistics
from lmlib.losses.next_token import NextToken, batch_loss
from lmlib.losses.objective import Metric
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import ForwardContext, single_document_context
from lmlib.models.weights import fold_in_name
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.parallel.layout import partition, sharding, shardings
from lmlib.parallel.mesh import make_mesh
from lmlib.state import (
    Training,
    abstract_batch,
    abstract_model,
    abstract_state,
    initial_state,
    new_state,
)

V, E, L, B, S, RATE = 48, 32, 2, 16, 8, 0.25
MESHES = {
    "1": ({}, False),
    "4 fsdp, 2 tensor": ({"fsdp": 4, "tensor": 2}, False),
    "2, 2, 2, sequence-parallel": ({"data": 2, "fsdp": 2, "tensor": 2}, True),
}
FLOAT32, DROPPED = Compute(dtype="float32"), NextToken(dropout=RATE)
make = functools.partial(
    llama, vocab=V, embed=E, layers=L, heads=4, kv_heads=2, mlp=48, key=jax.random.key(0)
)
weights = functools.cache(lambda: drawn(jax.eval_shape(make)))
source = Synthetic(vocab_size=V, batch_size=B, sequence_length=S)
optimizer = Optimizer(optax.sgd(0.1, momentum=0.5), optax.constant_schedule(0.1), as_declared)


def inputs(batch):
    return tuple(jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids))


def dropped(x_BSE, rate, key, sequence_parallel=False):
    compute = Compute(sequence_parallel=sequence_parallel)
    context = single_document_context(jnp.zeros(x_BSE.shape[:2], jnp.int32), compute)
    return dataclasses.replace(context, dropout=rate, key=key).dropped(x_BSE, "mlp")


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_share_of_zeros_is_the_rate_and_the_mean_stays(rate, dtype):
    random = np.random.default_rng(0)
    x_BSE = np.asarray(jnp.asarray(random.uniform(1, 2, (16, 64, 256)), dtype), np.float64)
    found_BSE = np.asarray(dropped(jnp.asarray(x_BSE, dtype), rate, jax.random.key(1)), np.float64)
    kept_BSE = found_BSE != 0
    n = x_BSE.size
    assert abs(kept_BSE.sum() - n * (1 - rate)) < 4 * np.sqrt(n * rate * (1 - rate))
    # The remaining sum has the variance Σ x² rate / (1 - rate).
    deviation = np.sqrt(np.sum(x_BSE**2) * rate / (1 - rate))
    assert abs(found_BSE.sum() - x_BSE.sum()) < 4 * deviation
    # Rounded once: a rate that was itself rounded to bfloat16 would be seen.
    relative = found_BSE[kept_BSE] / (x_BSE[kept_BSE] / (1 - rate))
    np.testing.assert_allclose(relative, 1, atol=2e-7 if dtype == "float32" else 2**-8)
    assert relative.mean() == pytest.approx(1, abs=5e-4)


def documented_factors(key, shape, rate):
    """0 or 1 / (1 - rate): keys descend by field and layer, like the weights' keys."""

    def factor(key, name):
        kept = jax.random.bernoulli(fold_in_name(key, name), 1 - rate, shape)
        return np.asarray(kept, np.float64) / (1 - rate)

    layers = [jax.random.fold_in(fold_in_name(key, "blocks"), layer) for layer in range(L)]
    return {
        "embedding": factor(key, "embedding"),
        "attention": np.stack([factor(layer, "attention") for layer in layers]),
        "mlp": np.stack([factor(layer, "mlp") for layer in layers]),
    }


def test_logits_match_the_equations_with_the_documented_masks():
    model, key = weights(), jax.random.key(11)
    tokens_BS, positions_BS, segment_ids_BS = (x_BS[:3] for x_BS in inputs(source.batch(0)))
    factors = documented_factors(key, (3, S, E), RATE)
    masks = [factors["embedding"], *factors["attention"], *factors["mlp"]]
    assert len({mask.tobytes() for mask in masks}) == 1 + 2 * L
    exact = jax.tree.map(lambda weight: np.asarray(weight, np.float64), model)
    expected = reference_logits(
        exact, tokens_BS, positions_BS, segment_ids_BS, 10_000.0, 1e-5, factors
    )
    context = ForwardContext(positions_BS, segment_ids_BS, FLOAT32, key, RATE)
    with jax.default_matmul_precision("highest"):
        logits_BSV = jax.jit(lambda model: model(tokens_BS, context))(model)
    found = np.asarray(logits_BSV, np.float64)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.slow
def test_inspection_uses_no_dropout():
    """Nothing is dropped without a key, and nothing else than training gives one."""
    mesh, model = make_mesh(), weights()
    batch = jax.tree.map(jnp.asarray, source.batch(0))

    @functools.partial(jax.jit, static_argnums=2)
    def sums(model, batch, objective):
        return batch_loss(model, batch, FLOAT32, objective)[0]

    plain = sums(model, batch, NextToken())
    assert_same_bits(sums(model, batch, DROPPED), plain)
    loss = pytest.approx(float(plain.reported["loss"]) / int(batch.loss_mask.sum()), rel=1e-6)
    assert Evaluator(mesh, FLOAT32)(model, source, 1).loss == loss
    assert layer_statistics(model, batch, mesh, FLOAT32).loss == loss
    prompt_BS = jnp.array([[1, 2]])
    context = dataclasses.replace(single_document_context(prompt_BS, FLOAT32), dropout=RATE)
    logits_BSV = jax.jit(lambda model: model(prompt_BS, context))(model)
    likeliest = int(jnp.argmax(logits_BSV[0, -1]))
    ((made,),) = generate(model, [[1, 2]], 1, GREEDY, mesh=mesh, compute=FLOAT32)
    assert made.tokens == [likeliest]


def lowered_step(mesh_name, rate=RATE):
    sizes, sequence_parallel = MESHES[mesh_name]
    mesh = make_mesh(**sizes)
    compute = Compute(dtype="float32", sequence_parallel=sequence_parallel)
    objective = NextToken(dropout=rate)
    training = Training(optimizer, mesh, compute, objective, microbatches=2)
    state, batch = abstract_state(make, training), abstract_batch(B, S, mesh)
    return train.trace_step(state, batch, training).lower(), training


@functools.cache
def compiled_step(mesh_name):
    lowered, training = lowered_step(mesh_name)
    return lowered.compile(), training


def advance(mesh_name, steps):
    """The state after the first `steps` steps, and their losses."""
    state = first_state(weights(), optimizer, make_mesh(**MESHES[mesh_name][0]))
    compiled, training = compiled_step(mesh_name)
    rows, losses = sharding("batch seq", training.mesh), []
    for step in range(steps):
        state, metrics = compiled(state, place(source, step, rows), training.hyperparameters)
        losses.append(float(metrics["loss"]))
    return state, np.array(losses)


@pytest.mark.slow
def test_a_step_without_dropout_draws_nothing():
    """Threefry is the only part of a step that takes exclusive ors."""
    assert "stablehlo.xor" in lowered_step("1")[0].as_text()
    assert "stablehlo.xor" not in lowered_step("1", rate=0.0)[0].as_text()


@dataclasses.dataclass(frozen=True)
class Draws(NextToken):
    """Reports a number that its key draws."""

    @property
    def metrics(self):
        return {"loss": Metric("nats per token"), "drawn": Metric("")}

    def sums(self, model, reference_model, batch, compute, key=None):
        sums = super().sums(model, reference_model, batch, compute)
        return sums._replace(reported=sums.reported | {"drawn": jax.random.uniform(key)})


def test_each_microbatch_has_the_documented_key():
    mesh, seed = make_mesh(), 5
    training = Training(optimizer, mesh, FLOAT32, Draws(), microbatches=2, seed=seed)
    state = new_state(functools.partial(Bigram, V, E, key=jax.random.key(0)), training)
    state = eqx.tree_at(lambda state: state.step, state, jnp.int32(3))
    with jax.set_mesh(mesh):
        batch = place(source, 0, sharding("batch seq", mesh))
        _, reported, count = jax.jit(functools.partial(train.gradient, training=training))(
            state, batch
        )
    key = jax.random.fold_in(fold_in_name(jax.random.key(seed), "steps"), 3)
    drawn_of = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(2)]
    assert float(reported.metrics["drawn"] * count) == pytest.approx(sum(drawn_of), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_name", list(MESHES)[1:])
def test_every_mesh_drops_the_same(mesh_name):
    sizes, sequence_parallel = MESHES[mesh_name]
    layout = "batch seq_parallel embed" if sequence_parallel else "batch seq embed"
    key = jax.random.key(3)
    expected = dropped(jnp.ones((B, S, E)), RATE, key, sequence_parallel)
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        x_BSE = jax.device_put(jnp.ones((B, S, E)), sharding(layout, mesh))
        found = dropped(x_BSE, RATE, key, sequence_parallel)
    assert found.sharding.spec == partition(layout, mesh=mesh)
    np.testing.assert_array_equal(found, expected)
    _, losses = advance(mesh_name, 6)
    np.testing.assert_allclose(losses, advance("1", 6)[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"saved": EVERYTHING, "unroll": L}, {}])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(settings):
    """The backward pass computes the layers again; differences, which are the reference, do not."""
    with jax.enable_x64(True):
        model = jax.tree.map(lambda weight: weight.astype(jnp.float64), weights())
        compute = Compute(dtype="float64", **settings)
        random = np.random.default_rng(0)
        direction = jax.tree.map(
            lambda weight: jnp.asarray(random.normal(size=weight.shape)), model
        )

        def loss(model):
            sums, _ = batch_loss(model, source.batch(0), compute, DROPPED, jax.random.key(2))
            return sums.loss_sum

        def moved(distance):
            there = jax.tree.map(lambda w, d: w + distance * d, model, direction)
            return float(jax.jit(loss)(there))

        step = 1e-6
        expected = (moved(step) - moved(-step)) / (2 * step)
        gradients = jax.jit(jax.grad(loss))(model)
        products = jax.tree.map(lambda g, d: float(jnp.vdot(g, d)), gradients, direction)
        assert sum(jax.tree.leaves(products)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.several_devices
def test_no_mask_is_kept_for_the_backward_pass():
    mesh = make_mesh(fsdp=4, tensor=2)

    def kept(rate):
        model, batch = abstract_model(make, mesh), abstract_batch(B, S, mesh)

        def loss(model, batch):
            sums, _ = batch_loss(model, batch, FLOAT32, NextToken(dropout=rate), jax.random.key(0))
            return sums.loss_sum

        with jax.set_mesh(mesh):
            pullback = jax.eval_shape(
                lambda m, b: jax.vjp(lambda m: loss(m, b), m)[1], model, batch
            )
        leaves = jax.tree.leaves(pullback)
        return Counter((leaf.shape, leaf.dtype) for leaf in leaves if leaf.size >= B * S * E)

    assert kept(RATE) == kept(0.0)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(ValueError, match=f"dropout must be at least 0 and below 1, got {rate}"):
        NextToken(dropout=rate)


@pytest.mark.slow
def test_one_model_can_be_trained_on_from_its_weights_alone():
    mesh = make_mesh(fsdp=4, tensor=2)
    trained, _ = advance("4 fsdp, 2 tensor", 2)
    kept = jax.device_get(trained.model)
    state = initial_state(trained.model, Training(optimizer, mesh, seed=7))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trained.model))
    assert_same_bits(state.model, kept)
    fresh = first_state(weights(), optimizer, mesh, seed=7)
    rest = [(each.step, each.optimizer, each.guard, each.key) for each in (state, fresh)]
    assert_same_bits(*rest)
    assert shardings(state) == shardings(fresh)
