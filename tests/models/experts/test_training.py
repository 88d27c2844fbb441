"""A model with experts trains on every mesh as on one device, resumes bit for bit, and its router
is kept in balance exactly, for any microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from outsider_runs import SIZES, check_outsider, compiled, experiment, trained

from lmlib import Compute, NextToken, hf
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.llama import llama
from lmlib.optim.trainable import Group

pytestmark = pytest.mark.several_devices

EXPERTS, RATE = 8, 0.01
ROUTER = functools.partial(Router, scores="sigmoid", correction_rate=RATE, balance="batch")
MODEL = functools.partial(
    llama, **SIZES, layers=2, heads=4, mlp=16,
    feed_forward=functools.partial(Mixture, experts=EXPERTS, top=2, shared_mlp=16, router=ROUTER),
)  # fmt: skip
MESHES = {
    "8 expert": {"expert": 8},
    "2 fsdp, 2 expert, 2 tensor": {"fsdp": 2, "expert": 2, "tensor": 2},
    "2 data, 4 fsdp": {"data": 2, "fsdp": 4},
}


run_of = functools.partial(
    experiment, MODEL,
    objective=NextToken(model_losses={"router_z": 1e-2, "router_balance": 1e-1}),
)  # fmt: skip


def corrections(state):
    return np.stack([np.asarray(each) for each in jax.tree.leaves(state.buffers)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "dispatch", "microbatches"),
    [
        ("2 fsdp, 2 expert, 2 tensor", "exchange", 1),
        ("2 fsdp, 2 expert, 2 tensor", "gather", 2),
        ("8 expert", "exchange", 2),
        ("2 data, 4 fsdp", "gather", 1),
    ],
)
def test_experts_train_as_on_one_device_and_resume_bit_for_bit(
    mesh, dispatch, microbatches, tmp_path
):
    compute = Compute(dtype="float32", dispatch=dispatch, expert_room=1.0)
    run = run_of(MESHES[mesh], compute, microbatches=microbatches)
    metrics, state = check_outsider(run, run_of({}), tmp_path, rtol=1e-4)
    assert corrections(state).shape == (2, 2, EXPERTS) and corrections(state).any()
    for of_step in metrics:
        assert of_step["expert_dropped"] == 0
        assert of_step["expert_most_tokens"] > 1 > of_step["expert_fewest_tokens"] >= 0
        assert 0 < of_step["router_entropy"] < np.log(EXPERTS) and of_step["router_z"] > 0


def test_a_router_that_the_loss_cannot_teach_is_not_trained():
    ones = functools.partial(
        Mixture, experts=4, top=1, router=functools.partial(Router, normalized=True)
    )
    model = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16, feed_forward=ones)
    with pytest.raises(ValueError, match=r"mlp\.router would get no gradient .* or top=2 or more"):
        experiment(model, {}).check()
    experiment(model, {}, trainable={"attention": Group(paths=("*.attention.*",))}).check()
    with pytest.raises(ValueError, match=r"mlp\.router would get no gradient"):
        experiment(model, {}, trainable={"mlp": Group(paths=("*.mlp.*",))}).check()


@pytest.mark.slow
def test_the_balance_of_a_row_is_that_of_the_whole_row_where_devices_share_it(tmp_path):
    by_row = functools.partial(Router, balance="row")
    mixture = functools.partial(Mixture, experts=EXPERTS, top=2, router=by_row)
    model = functools.partial(llama, **SIZES, layers=2, heads=4, mlp=16, feed_forward=mixture)
    objective = NextToken(model_losses={"router_balance": 1.0})
    run_of = functools.partial(experiment, model, objective=objective)
    on_one = run_of({})
    compute = Compute(dtype="float32", dispatch="exchange", context_method="ring")
    run = run_of({"expert": 2, "context": 2, "tensor": 2}, compute, microbatches=2)
    check_outsider(run, on_one, tmp_path, rtol=1e-4)


@pytest.mark.slow
def test_saved_activations_do_not_change_gradients():
    """Here "everything" keeps the first round's activations, which are otherwise computed again."""
    for saved in ((), ("expert_gate", "expert_up"), ("everything",)):
        compute = Compute(dtype="float32", saved=saved, dispatch="exchange", expert_room=1.0)
        run = run_of({"expert": 4, "tensor": 2}, compute)
        metrics, _ = trained(run, compiled(run), run.initial_state())
        norms = [of_step["grad_norm"] for of_step in metrics]
        if saved == ():
            wanted = norms
        np.testing.assert_allclose(norms, wanted, rtol=1e-5)


@pytest.mark.slow
def test_flops_are_those_of_active_experts():
    dense = llama(**SIZES, layers=2, heads=4, mlp=3 * 16, key=jax.random.key(0))
    model = MODEL(key=jax.random.key(0))
    router = 6 * 2 * SIZES["embed"] * EXPERTS
    found = model.flops_per_token(64, causal=True)  # two experts and a shared one, of 16 each
    assert found == dense.flops_per_token(64, causal=True) + router


@pytest.mark.slow
def test_a_model_balanced_over_batches_leaves_as_one_that_routes_alike(tmp_path):
    """Folders do not contain how full experts were."""

    def mixture(balance):
        router = functools.partial(Router, balance=balance)
        experts = functools.partial(Mixture, experts=4, top=2, router=router)
        sizes = {"layers": 2, "heads": 4, "mlp": 8, "feed_forward": experts}
        return llama(**SIZES, **sizes, key=jax.random.key(0))

    model = mixture("batch")
    hf.save(model, tmp_path / "out")
    read = hf.load(tmp_path / "out")
    assert jax.tree.structure(read) == jax.tree.structure(mixture("row"))
    tokens_BS = jnp.arange(SIZES["vocab"], dtype=jnp.int32)[None]
    np.testing.assert_array_equal(read(tokens_BS), model(tokens_BS))
