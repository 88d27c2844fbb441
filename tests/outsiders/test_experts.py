"""The mixture of experts of routed_experts.py trains, is observed and is counted as lmlib's are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outsider_runs import EIGHT, SIZES, SOURCE, check_outsider, compiled, experiment, trained
from routed_experts import EXPERTS, RATE, Experts

from lmlib import Compute, NextToken
from lmlib.inspect.layer_statistics import layer_statistics
from lmlib.models.families.llama import llama

pytestmark = pytest.mark.several_devices


MODEL = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16, feed_forward=Experts)
run_of = functools.partial(experiment, MODEL, objective=NextToken(model_losses={"router_z": 1e-2}))


def biases(state):
    (buffer,) = jax.tree.leaves(state.buffers)
    return np.asarray(buffer)


@pytest.mark.slow
def test_experts_train_as_on_one_device_and_resume_bit_for_bit(tmp_path):
    saving_router = Compute(dtype="float32", saved=("router", "attention"))
    run = run_of(EIGHT, saving_router, microbatches=2)
    metrics, state = check_outsider(run, run_of({}), tmp_path, rtol=1e-4)
    assert metrics[0]["router_z"] > 0 and 1 / EXPERTS < metrics[0]["first_choice"] < 1
    assert biases(state).shape == (2, EXPERTS) and np.abs(biases(state)).max() > RATE / 10
    np.testing.assert_allclose(biases(state).mean(axis=1), 0, atol=1e-7)


@pytest.mark.slow
def test_a_skipped_update_leaves_the_bias_and_a_coefficient_may_change():
    run = run_of({}, objective=NextToken(z_loss=3e38))
    metrics, state = trained(run, compiled(run), run.initial_state())
    assert metrics[-1]["skipped_updates"] == len(metrics) and not biases(state).any()
    assert metrics[0]["router_z"] > 0  # reported, and not minimised


@pytest.mark.slow
def test_layer_statistics_are_of_all_that_is_minimised():
    run = run_of({})
    state, batch = run.initial_state(), jax.tree.map(jnp.asarray, SOURCE.batch(0))
    objectives = NextToken(), NextToken(model_losses={"router_z": 0.5})
    of = functools.partial(layer_statistics, state.whole_model, batch, run.mesh, run.compute)
    without, found = (of(objective).loss for objective in objectives)
    metrics, _ = trained(run, compiled(run), state)
    assert without == pytest.approx(metrics[0]["loss"], rel=1e-5)
    assert found - without == pytest.approx(metrics[0]["router_z"] / 2, rel=1e-4)


@pytest.mark.slow
def test_only_active_experts_count_and_unknown_losses_are_refused():
    model = run_of({}).recipe.shapes
    dense = llama(**SIZES, layers=2, heads=4, mlp=16, key=jax.random.key(0))
    mlps = 2 * 6.0 * (2 * 2 * 32 * 16 + 32 * EXPERTS)  # two matrices of two experts, the router
    gated = 2 * 6.0 * 3 * 32 * 16
    expected = dense.flops_per_token(16, True) - gated + mlps
    assert model.flops_per_token(SOURCE.sequence_length, True) == expected
    wrong = run_of({}, objective=NextToken(model_losses={"router_balance": 0.1}))
    with pytest.raises(ValueError, match=r"'router_balance'.* reports router_z"):
        wrong.check()
