"""The targets of multi-token prediction, its loss on every mesh, and that each depth learns."""

import dataclasses
import functools
import math

import jax
import laid_out
import numpy as np
import pytest
from sentinels import sentinels

from lmlib import train
from lmlib.adapters.lora import with_adapters
from lmlib.compute import Compute
from lmlib.data.batch import packed_batch, place
from lmlib.data.synthetic import Synthetic
from lmlib.losses.multi_token import MultiToken, tokens_ahead
from lmlib.losses.next_token import NextToken
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.llama import llama
from lmlib.models.families.transformer import transformer
from lmlib.models.multi_token import multi_token
from lmlib.optim.adamw import adamw
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import named_weights
from lmlib.plan.flops import count_flops
from lmlib.state import Training, abstract_batch, abstract_state

FLOAT32 = Compute(dtype="float32")
OBJECTIVE = MultiToken(weights=(0.3, 0.2))
BALANCED = dataclasses.replace(OBJECTIVE, model_losses={"router_balance": 0.01})
V, B, S = 64, 8, 16
source = Synthetic(vocab_size=V, batch_size=B, sequence_length=S)


@functools.cache
def weights(tied=False, experts=False, adapters=False):
    sizes = {"vocab": V, "embed": 32, "layers": 2, "heads": 8, "kv_heads": 4, "mlp": 48}
    of = functools.partial(llama, **sizes, tied=tied)
    if experts:
        mixture = functools.partial(Mixture, experts=8, top=2)
        of = functools.partial(transformer, **sizes, feed_forward=mixture)

    def make():
        made = multi_token(of, 2, key=jax.random.key(0))
        paths = "stack.*", "predictors.*"
        return with_adapters(made, 4, paths=paths, key=jax.random.key(1)) if adapters else made

    return laid_out.drawn(jax.eval_shape(make))


def test_tokens_and_targets_are_of_the_same_document():
    random = np.random.default_rng(0)
    tokens_BT = random.integers(1, V, (3, 13)).astype(np.int32)
    starts_BT = np.zeros((3, 13), bool)
    starts_BT[0, [4, 5, 9]] = starts_BT[1, 11] = True
    lengths_B = np.array([12, 12, 7])
    masked_BT = random.random((3, 13)) < 0.8
    batch = packed_batch(tokens_BT, starts_BT, lengths_B, targets_BT=masked_BT)
    document_BT = np.cumsum(starts_BT, axis=1)
    for depth in (1, 2, 3, 12, 20):
        ahead = tokens_ahead(batch, depth)
        for b, i in np.ndindex(3, 12):
            last = i + depth + 1  # the target
            within = last <= lengths_B[b] and document_BT[b, i] == document_BT[b, last]
            assert ahead.loss_mask_BS[b, i] == (within and masked_BT[b, last])
            if within:
                assert ahead.is_there_BS[b, i]
                assert ahead.tokens_BS[b, i] == tokens_BT[b, last - 1]
                assert ahead.targets_BS[b, i] == tokens_BT[b, last]


@functools.cache
def loss_and_gradients(sizes, kind=(), order="zigzag", **compute):
    compute, objective = (
        Compute(dtype="float32", **compute),
        BALANCED if "experts" in kind else OBJECTIVE,
    )

    def mean(model, batch):
        sums = objective.sums(model, None, batch, compute)
        loss = objective.mean_loss(sums, batch.loss_mask.sum(), (batch.segment_ids > 0).sum())
        return loss, sums.reported

    mesh = make_mesh(**dict(sizes))
    model = laid_out.laid_out(weights(**dict.fromkeys(kind, True)), mesh)
    with jax.set_mesh(mesh):
        batch = place(source, 0, sharding("batch seq", mesh), order)
        found, gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(model, batch)
    return jax.device_get(found), jax.device_get(gradients)


def sizes(**axes):
    return tuple(axes.items())


CASES = [
    (sizes(fsdp=8), {"kind": ("tied",)}),
    (sizes(data=2, fsdp=2, tensor=2), {"sequence_parallel": True}),
    (sizes(tensor=4, fsdp=2), {"kind": ("tied",)}),
    (sizes(tensor=2, fsdp=2), {"kind": ("adapters",)}),
    (sizes(expert=4, tensor=2), {"kind": ("experts",)}),
    (sizes(context=4, fsdp=2), {}),
    (sizes(context=2, tensor=2), {"order": "plain", "sequence_parallel": True}),
    (sizes(stage=2, fsdp=2), {}),
    (sizes(stage=2, context=2, tensor=2), {"kind": ("tied",)}),
    (sizes(stage=2, expert=2, context=2), {"kind": ("experts",)}),
]
KEPT, LANDING = CASES[6].__eq__, CASES[-1].__eq__


@pytest.mark.several_devices
@pytest.mark.parametrize(("mesh", "how"), sentinels(CASES, KEPT, landing=LANDING))
def test_loss_metrics_and_gradients_equal_those_of_one_device(mesh, how):
    documents_BS = source.batch(0).segment_ids  # a device has pieces of at least two tokens
    assert (documents_BS[:, 1:-1:2] == documents_BS[:, 2::2]).sum() > 20, "none crosses a border"
    kind = how.get("kind", ())
    expected = loss_and_gradients((), kind)
    found = loss_and_gradients(mesh, **how)
    for one, other in zip(*map(jax.tree.leaves, (found[0], expected[0])), strict=True):
        assert one == pytest.approx(other, rel=2e-6)
    laid_out.assert_near(found[1], expected[1], 2e-5)
    if "adapters" not in kind:  # whose bases are frozen
        assert all(np.abs(each).max() > 0 for each in jax.tree.leaves(found[1].predictors))


def curve(microbatches=1, steps=1, model=None, trained=None):
    mesh, optimizer = make_mesh(devices=jax.devices()[:1]), adamw(steps, peak_lr=1e-2)
    settings = {"microbatches": microbatches, "trained": trained}
    training = Training(optimizer, mesh, FLOAT32, OBJECTIVE, **settings)
    state = laid_out.first_state(model or weights(), optimizer, mesh, trained=trained)
    step = train.make_step(training)
    rows, found = sharding("batch seq", mesh), []
    for number in range(steps):
        state, metrics = step(state, place(source, number, rows))
        found.append({name: float(each) for name, each in metrics.items()})
    return found


@pytest.mark.parametrize("microbatches", [2, pytest.param(8, marks=pytest.mark.landing)])
def test_microbatches_change_nothing(microbatches):
    (expected,), (found,) = curve(), curve(microbatches=microbatches)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.landing
def test_each_depth_begins_near_a_guess_and_learns():
    of = functools.partial(llama, vocab=V, embed=32, layers=1, heads=4, mlp=64)
    model = multi_token(of, 2, key=jax.random.key(0))
    found = curve(steps=60, model=model)
    for name in OBJECTIVE.metrics:
        if name.startswith("loss"):
            assert found[0][name] == pytest.approx(math.log(V), abs=0.2)
            assert found[-1][name] < found[0][name] - 0.3
    assert 0.1 < found[0]["targets_3"] < found[0]["targets_2"] < 1


@pytest.mark.landing
def test_heads_can_train_alone():
    paths = {path for path in named_weights(weights()) if path.startswith("predictors.")}
    found = curve(steps=8, trained=paths)
    batch = source.batch(7)
    before = OBJECTIVE.sums(weights(), None, batch, FLOAT32).reported
    before = OBJECTIVE.means({name: float(x) / batch.loss_mask.sum() for name, x in before.items()})
    assert found[-1]["loss"] == pytest.approx(before["loss"], rel=1e-5)
    assert found[-1]["loss_2"] < before["loss_2"] and found[-1]["loss_3"] < before["loss_3"]


def test_the_loss_of_the_next_token_is_that_of_next_token():
    batch = source.batch(0)
    plain = NextToken().sums(weights(), None, batch, FLOAT32)
    found = OBJECTIVE.sums(weights(), None, batch, FLOAT32)
    assert found.reported["loss"] == plain.reported["loss"]
    of_heads = 0.3 * found.reported["loss_2"] + 0.2 * found.reported["loss_3"]
    assert float(found.loss_sum) == pytest.approx(float(plain.loss_sum + of_heads), rel=1e-6)


def test_wrong_models_and_weights_are_refused():
    with pytest.raises(ValueError, match="weights for 1 heads, and the model has 2"):
        MultiToken().check(weights(), None, None)
    with pytest.raises(ValueError, match="the model has 0: make it with"):
        MultiToken().check(llama(V, 32, 1, 4, 8, key=jax.random.key(0)), None, None)
    with pytest.raises(ValueError, match="one for each head, got \\(\\)"):
        MultiToken(weights=())


def test_flops_are_those_of_the_products():
    model = weights()
    E, F, heads, kv_heads, head_dim = 32, 48, 8, 4, 4
    of_layer = 2 * E * heads * head_dim + 2 * E * kv_heads * head_dim + 3 * E * F
    attention = 12 * S * heads * head_dim
    of_head = 6 * (2 * E * E + of_layer + V * E) + attention
    assert OBJECTIVE.flops_per_token(model, S, False) == 2 * of_head

    compute, mesh = (
        Compute(dtype="float32", attention="plain"),
        make_mesh(devices=jax.devices()[:1]),
    )
    training = Training(adamw(1, peak_lr=1e-2), mesh, compute, OBJECTIVE)
    numbers, state = training.hyperparameters, abstract_state(lambda: model, training)
    step = functools.partial(train.step, hyperparameters=numbers, training=training)
    with jax.set_mesh(mesh):
        found = count_flops(jax.make_jaxpr(step)(state, abstract_batch(B, S, mesh)))
    of_decoder = 2 * (6 * of_layer + attention) + 6 * V * E
    assert found.of("forward", "backward") == (of_decoder + 2 * of_head) * B * S
    # Each layer again, except for its last product; neither combinations nor logits.
    again = 2 * (of_layer - E * F) + attention / 3
    assert found.of("recomputation") == 4 * again * B * S
