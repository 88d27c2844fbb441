"""One step: every valid token counts once, however the batch is split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bigram import Bigram
from hypothesis import given, settings
from hypothesis import strategies as st
from laid_out import drawn, first_state
from sentinels import sentinels

from lmlib import train
from lmlib.compute import Compute
from lmlib.data.batch import Batch, place
from lmlib.data.synthetic import Synthetic
from lmlib.losses.next_token import NextToken
from lmlib.models.families.llama import llama
from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import AuxOutputs
from lmlib.optim.adamw import adamw
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.parallel.layout import sharding, shardings
from lmlib.parallel.mesh import make_mesh
from lmlib.state import Training, abstract_batch, abstract_state, initial_state

B, S, V = 8, 12, 40
make = functools.partial(llama, vocab=V, embed=16, layers=2, heads=2, mlp=24, key=jax.random.key(0))
FLOAT32 = Compute(dtype="float32")
# Plain descent with rate one: the update is the gradient.
descent = Optimizer(optax.sgd(1.0), optax.constant_schedule(1.0), as_declared)
source = Synthetic(vocab_size=V, batch_size=B, sequence_length=S)


def batch_with(mask_BS):
    batch = source.batch(0)
    return Batch(batch.tokens, batch.targets, batch.segment_ids, batch.positions, mask_BS)


@functools.cache
def compiled_step(microbatches, z_loss=0.0, **mesh):
    mesh = make_mesh(**mesh)
    training = Training(descent, mesh, FLOAT32, NextToken(z_loss), microbatches=microbatches)
    state, batch = abstract_state(make, training), abstract_batch(B, S, mesh)
    return train.trace_step(state, batch, training).lower().compile(), mesh


@functools.cache
def initial_model():
    return jax.device_get(drawn(jax.eval_shape(make)))


def gradient_and_metrics(mask_BS, microbatches, z_loss=0.0, **mesh):
    compiled, mesh = compiled_step(microbatches, z_loss, **mesh)
    rows = sharding("batch seq", mesh)
    batch = jax.tree.map(lambda x: jax.device_put(x, rows), batch_with(mask_BS))
    state, metrics = compiled(first_state(initial_model(), descent, mesh), batch, {})
    before, after = jax.tree.leaves(initial_model()), jax.tree.leaves(state.model)
    gradient = [one - np.asarray(other) for one, other in zip(before, after, strict=True)]
    return gradient, jax.device_get(metrics)


def logits(model, batch):
    tokens_BS, positions_BS, segment_ids_BS = (
        jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segment_ids)
    )
    return model(tokens_BS, ForwardContext(positions_BS, segment_ids_BS, FLOAT32))


def losses_of(model):
    """Returns losses of each position of the batch, (B, S)."""
    batch = source.batch(0)
    log_p_BSV = jax.nn.log_softmax(logits(model, batch))
    return -jnp.take_along_axis(log_p_BSV, jnp.asarray(batch.targets)[..., None], -1)[..., 0]


@functools.cache
def token_gradients():
    """Returns loss and gradient of each position, computed one by one in float64."""
    model = initial_model()

    @jax.jit
    def one(model, b, s):
        return jax.value_and_grad(lambda model: losses_of(model)[b, s])(model)

    # One position after another: no batched backward pass that could share a fault with the step.
    each = [[one(model, b, s) for s in range(S)] for b in range(B)]
    losses_BS = np.array([[float(loss) for loss, _ in row] for row in each])
    gradients = [[jax.tree.leaves(gradient) for _, gradient in row] for row in each]
    return losses_BS, [
        np.array([[leaves[i] for leaves in row] for row in gradients], np.float64)
        for i in range(len(gradients[0][0]))
    ]


masks = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.sampled_from([0.02, 0.3, 0.9, 1.0]).map(
        lambda share: np.random.default_rng(seed).random((B, S)) < share
    )
)


@pytest.mark.slow
@settings(max_examples=6)
@given(masks, st.sampled_from([1, 4]))
def test_any_split_gives_the_mean_over_valid_tokens(mask_BS, microbatches):
    gradient, metrics = gradient_and_metrics(mask_BS, microbatches)
    losses_BS, jacobian = token_gradients()
    count = max(int(mask_BS.sum()), 1)
    assert metrics["tokens"] == mask_BS.sum()
    assert metrics["loss"] == pytest.approx((losses_BS * mask_BS).sum() / count, rel=1e-5)
    expected = [np.tensordot(mask_BS, each, 2) / count for each in jacobian]
    whole = np.sqrt(sum(np.linalg.norm(each) ** 2 for each in expected))
    for found, each in zip(gradient, expected, strict=True):
        # Some are only rounding errors of sums that cancel.
        scale = max(np.linalg.norm(each), 1e-2 * whole)
        assert np.linalg.norm(found - each) <= 2e-4 * scale


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("microbatches", "mesh"),
    sentinels(
        [(1, {"data": 2, "fsdp": 2, "expert": 2}), (2, {"data": 2, "fsdp": 2}), (2, {"data": 2})],
        lambda case: len(case[1]) == 1,
        landing=lambda case: len(case[1]) == 2,
    ),
)
def test_devices_with_uneven_masks_count_tokens_alike(microbatches, mesh):
    mask_BS = np.ones((B, S), bool)
    mask_BS[:4] = False
    mask_BS[5, 3:] = False
    expected, expected_metrics = gradient_and_metrics(mask_BS, 1)
    found, metrics = gradient_and_metrics(mask_BS, microbatches, **mesh)
    assert metrics["loss"] == pytest.approx(float(expected_metrics["loss"]), rel=1e-6)
    of_valid = np.asarray(jax.jit(losses_of)(initial_model()))[mask_BS]
    assert metrics["loss"] == pytest.approx(of_valid.mean(), rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.several_devices
def test_microbatches_spread_over_all_devices():
    """Splitting moves no row to another device."""
    mesh = make_mesh(data=2, fsdp=2)
    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(train.split, microbatches=2)).lower(
            abstract_batch(B, S, mesh)
        )
    text = program.compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert f" {collective}(" not in text


@pytest.mark.slow
def test_metrics_are_what_they_say():
    mask_BS = np.ones((B, S), bool)
    gradient, metrics = gradient_and_metrics(mask_BS, 4)
    weights = jax.tree.leaves(initial_model())

    def norm(leaves):
        return np.sqrt(sum((np.asarray(leaf, np.float64) ** 2).sum() for leaf in leaves))

    norms = {"grad_norm", "parameter_norm", "update_norm"}
    counts = {"tokens", "skipped_updates", "skipped_in_a_row", "empty_batches"}
    assert set(metrics) == {"loss", "learning_rate"} | norms | counts
    assert metrics["grad_norm"] == pytest.approx(norm(gradient), rel=1e-4)
    assert metrics["update_norm"] == pytest.approx(norm(gradient), rel=1e-4)
    assert metrics["parameter_norm"] == pytest.approx(norm(weights), rel=1e-5)
    assert metrics["learning_rate"] == 1.0


@pytest.mark.slow
def test_z_loss_pulls_the_normaliser_down_and_is_not_reported_as_loss():
    batch = source.batch(0)
    plain, metrics = gradient_and_metrics(batch.loss_mask, 1)
    with_z, metrics_with_z = gradient_and_metrics(batch.loss_mask, 1, z_loss=0.1)
    assert metrics_with_z["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-6)

    def mean_square(model):
        log_z_BS = jax.nn.logsumexp(logits(model, batch), axis=-1)
        return jnp.sum(jnp.square(log_z_BS) * batch.loss_mask) / batch.loss_mask.sum()

    expected = jax.jit(jax.grad(mean_square))(initial_model())
    for one, other, pull in zip(with_z, plain, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one - other, 0.1 * pull, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_loop_by_hand_makes_the_bits_of_the_compiled_step():
    """And its norm of the gradient is taken before that is clipped."""
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    optimizer = adamw(steps=3, peak_lr=1e-2, clip_norm=1e-3)
    training = Training(optimizer, mesh, FLOAT32, microbatches=2)
    compiled = train.trace_step(
        abstract_state(make, training), abstract_batch(B, S, mesh), training
    )
    compiled = compiled.lower().compile()
    by_hand, compiled_state = (first_state(initial_model(), optimizer, mesh) for _ in range(2))
    step, rows = train.make_step(training), sharding("batch seq", mesh)
    for number in range(3):
        by_hand, metrics = step(by_hand, source.batch(number))
        placed = place(source, number, rows)
        compiled_state, expected = compiled(compiled_state, placed, training.hyperparameters)
        assert jax.device_get(metrics) == jax.device_get(expected)
        assert metrics["grad_norm"] > 0.1
    assert shardings(by_hand) == shardings(compiled_state)
    jax.tree.map(np.testing.assert_array_equal, by_hand.model, compiled_state.model)
    with pytest.raises(ValueError, match="batch"):
        step(by_hand, Synthetic(vocab_size=V, batch_size=3, sequence_length=S).batch(0))


class Reporting(Bigram):
    """Has a loss of its own: the mean of a feature over tokens."""

    def trunk(self, tokens_BS, context, cache=None):
        trunk = super().trunk(tokens_BS, context)
        return trunk._replace(aux=AuxOutputs({"feature": context.total(trunk.x_BSE[..., 0])}, {}))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_losses_of_the_model_are_means_over_tokens_that_are_no_padding(microbatches):
    batch = batch_with(np.zeros((B, S), bool))  # so that nothing else has a gradient
    segment_ids_BS = np.ones((B, S), np.int32)
    segment_ids_BS[1:, 5:] = 0
    batch = dataclasses.replace(batch, segment_ids=segment_ids_BS)
    model, objective = (
        Reporting(V, 4, key=jax.random.key(0)),
        NextToken(model_losses={"feature": 3.0}),
    )
    training = Training(descent, make_mesh(), FLOAT32, objective, microbatches=microbatches)
    tokens = batch.tokens[segment_ids_BS > 0]
    expected = np.asarray(model.table_VE)[tokens, 0].mean()
    counts_V = np.bincount(tokens, minlength=V)
    with jax.set_mesh(training.mesh):
        state = initial_state(model, training)
        step = jax.jit(functools.partial(train.gradient, training=training))
        gradients, reported, _ = step(state, jax.tree.map(jnp.asarray, batch))
    assert float(reported.metrics["feature"]) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradients.table_VE[:, 0], 3 * counts_V / len(tokens), rtol=1e-5)
