"""A mixture of experts whose router has a loss, a statistic, and a bias that no gradient changes
(Wang et al. 2024, arXiv:2408.15664). Nothing of lmlib is edited."""

import functools
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float
from outsider_runs import EIGHT, SIZES, SOURCE, check_outsider, compiled, experiment, trained

from lmlib import Compute, NextToken
from lmlib.inspect.layer_statistics import layer_statistics
from lmlib.models.families.llama import llama
from lmlib.models.layer import SimplePart
from lmlib.models.product import product
from lmlib.models.protocol import Names, Reports
from lmlib.models.weights import fan_in, initial_values, product_flops, weight, zeros
from lmlib.optim import Optimizer, as_declared
from lmlib.parallel.layout import spec

pytestmark = pytest.mark.several_devices
EXPERTS, RATE = 4, 0.01
WHOLE = {"expert": None, "choice": None}


class Experts(SimplePart):
    """Two of four experts for each token; all are computed."""

    names: ClassVar[Names] = Names(saved=("router",), scopes=("router", "mlp"))

    router: Float[Array, "embed choice"] = weight(fan_in("embed"), rules=WHOLE, dtype="float32")
    bias: Float[Array, "choice"] = weight(zeros, rules=WHOLE, dtype="float32", gradient=False)
    up: Float[Array, "expert embed mlp"] = weight(fan_in("embed"), rules=WHOLE)
    down: Float[Array, "expert mlp embed"] = weight(fan_in("mlp"), rules=WHOLE)

    def __init__(self, embed, mlp, residual_scale, *, key):
        sizes = {"embed": embed, "mlp": mlp, "expert": EXPERTS, "choice": EXPERTS}
        for name in ("router", "bias", "up", "down"):
            setattr(self, name, initial_values(self, name, key, **sizes))

    def __call__(self, x_BSE, context):
        with jax.named_scope("router"):
            scores_BSX = product("bse,ex->bsx", x_BSE.astype(jnp.float32), self.router)
            share_BSX = checkpoint_name(jax.nn.softmax(scores_BSX), "router")
            _, choices_BS2 = jax.lax.top_k(share_BSX + self.bias, 2)
            chosen_BSX = jnp.sum(jax.nn.one_hot(choices_BS2, EXPERTS), axis=-2)
        with jax.named_scope("mlp"):
            h_BSXF = jax.nn.silu(product("bse,xef->bsxf", x_BSE, self.up))
            h_BSXF *= (share_BSX * chosen_BSX).astype(x_BSE.dtype)[..., None]
            out = spec(context.compute.residual)
            y_BSE = product("bsxf,xfe->bse", h_BSXF, self.down, out_sharding=out)
        tallies_X = context.total(chosen_BSX)
        return y_BSE, Reports(
            losses={"router_z": context.total(jax.nn.logsumexp(scores_BSX, axis=-1) ** 2)},
            statistics={"first_choice": context.total(jnp.max(share_BSX, axis=-1))},
            tallies=tallies_X,
        )

    def updated(self, tallies_X):
        mean = jnp.mean(tallies_X)
        moved_X = self.bias + RATE * (mean - tallies_X) / mean
        return eqx.tree_at(lambda experts: experts.bias, self, moved_X)

    def flops_per_token(self, sequence_length, causal):
        return product_flops(self) - 3.0 * (self.up.size + self.down.size)  # two of four


def sgd(steps):
    """No Adam, which makes a whole step of rounding where a gradient is zero: choices flip."""
    return Optimizer(optax.sgd(0.1), optax.constant_schedule(0.1), as_declared)


MODEL = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16, feed_forward=Experts)
run_of = functools.partial(
    experiment, MODEL, optimizer=sgd, objective=NextToken(model_losses={"router_z": 1e-2})
)


def biases(state):
    (buffer,) = jax.tree.leaves(state.buffers)
    return np.asarray(buffer)


def test_experts_train_as_on_one_device_and_resume_bit_for_bit(tmp_path):
    saving_router = Compute(dtype="float32", saved=("router", "attention"))
    run = run_of(EIGHT, saving_router, microbatches=2)
    metrics, state = check_outsider(run, run_of({}), tmp_path, rtol=1e-4)
    assert metrics[0]["router_z"] > 0 and 1 / EXPERTS < metrics[0]["first_choice"] < 1
    assert biases(state).shape == (2, EXPERTS) and np.abs(biases(state)).max() > RATE / 10
    np.testing.assert_allclose(biases(state).mean(axis=1), 0, atol=1e-7)


def test_a_skipped_update_leaves_the_bias_and_a_coefficient_may_change():
    run = run_of({}, objective=NextToken(z_loss=3e38))
    metrics, state = trained(run, compiled(run), run.initial_state())
    assert metrics[-1]["skipped_updates"] == len(metrics) and not biases(state).any()
    assert metrics[0]["router_z"] > 0  # reported, and not minimised


def test_layer_statistics_are_of_all_that_is_minimised():
    run = run_of({})
    state, batch = run.initial_state(), jax.tree.map(jnp.asarray, SOURCE.batch(0))
    objectives = NextToken(), NextToken(model_losses={"router_z": 0.5})
    of = functools.partial(layer_statistics, state.whole_model, batch, run.mesh, run.compute)
    without, found = (of(objective).loss for objective in objectives)
    metrics, _ = trained(run, compiled(run), state)
    assert without == pytest.approx(metrics[0]["loss"], rel=1e-5)
    assert found - without == pytest.approx(metrics[0]["router_z"] / 2, rel=1e-4)


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
