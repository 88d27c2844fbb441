"""DPO against its definition in float64 NumPy: loss, gradients, margins; packed pairs, masks."""

import dataclasses
import functools
from collections import defaultdict

import jax
import numpy as np
import optax
import pytest
from bigram import Bigram
from sentinels import sentinels

from lmlib import train
from lmlib.adapters.lora import lora, with_adapters
from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.dpo import DPO
from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairedObjective, Pairs
from lmlib.models.families.llama import llama
from lmlib.models.matrices.lora import map_adapted
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.optim.trainable import Group, adapters
from lmlib.parallel.layout import sharding, shardings
from lmlib.parallel.mesh import make_mesh
from lmlib.recipe import MATRICES, Recipe
from lmlib.row_order import places
from lmlib.state import Training, abstract_model, initial_state

B, S, E, V = 8, 24, 8, 32
FLOAT32 = Compute(dtype="float32")
OBJECTIVE = DPO(beta=0.3, label_smoothing=0.1)
MANY = {"data": 2, "fsdp": 2, "tensor": 2}
policy, reference = (
    functools.cache(functools.partial(Bigram, V, E, key=jax.random.key(seed))) for seed in (0, 1)
)


@functools.cache
def base():
    return llama(vocab=V, embed=16, layers=1, heads=2, mlp=16, key=jax.random.key(0))


def adapted(**settings):
    """Returns the base with adapters that change its output."""
    model = with_adapters(base(), rank=2, key=jax.random.key(1), **settings)
    return map_adapted(lambda _, one: dataclasses.replace(one, up=one.up + 0.1), model)


@functools.cache
def batch():
    """Rows of up to three pairs of uneven lengths, then padding. Of the second row's first pair no
    target of the rejected response is marked; the last row has only padding."""
    random = np.random.default_rng(0)
    segment_ids_BS = np.zeros((B, S), np.int32)
    for row in range(B - 1):
        lengths = random.integers(2, 5, 2 * random.integers(1, 4))
        segment_ids_BS[row, : lengths.sum()] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    ends_BS = np.diff(segment_ids_BS, append=0) != 0
    mask_BS = (segment_ids_BS > 0) & ~ends_BS
    starts_BS = np.diff(segment_ids_BS, prepend=0) != 0
    mask_BS &= ~starts_BS | (random.random((B, S)) < 0.5)  # prompts are not marked
    mask_BS[1] &= segment_ids_BS[1] != 2
    tokens_BS = random.integers(0, V, (B, S)).astype(np.int32)
    targets_BS = np.roll(tokens_BS, -1, axis=1)
    return Batch(tokens_BS, targets_BS, segment_ids_BS, np.zeros_like(tokens_BS), mask_BS)


def log_softmax(logits_V):
    shifted_V = logits_V - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def marked_targets(batch):
    """Tokens and their targets, of each row and segment."""
    marked = defaultdict(list)
    for b, s in np.argwhere(batch.loss_mask):
        marked[b, batch.segment_ids[b, s]].append((batch.tokens[b, s], batch.targets[b, s]))
    return marked


@functools.cache
def definition():
    """Means over pairs, how many pairs there are, and the gradients of the mean loss."""
    model, other = (
        [np.asarray(each, np.float64) for each in jax.tree.leaves(make())]
        for make in (policy, reference)
    )
    marked = marked_targets(batch())

    def log_probability(model, key):
        table_VE, head_EV = model
        return sum(log_softmax(table_VE[x] @ head_EV)[y] for x, y in marked[key])

    sums, gradients = defaultdict(float), [np.zeros_like(each) for each in model]
    pairs = [
        (chosen, rejected)
        for chosen in list(marked)
        if chosen[1] % 2 == 1 and marked[rejected := (chosen[0], chosen[1] + 1)]
    ]
    beta, smoothing = OBJECTIVE.beta, OBJECTIVE.label_smoothing
    for chosen, rejected in pairs:
        log_p = {key: log_probability(model, key) for key in (chosen, rejected)}
        gains = [log_p[key] - log_probability(other, key) for key in (chosen, rejected)]
        margin = beta * (gains[0] - gains[1])
        sums["loss"] -= (1 - smoothing) * np.log(sigmoid(margin))
        sums["loss"] -= smoothing * np.log(sigmoid(-margin))
        sums["reward_margin"] += margin
        sums["reward_accuracy"] += margin > 0
        sums["chosen_reward"] += beta * gains[0]
        sums["rejected_reward"] += beta * gains[1]
        sums["chosen_log_probability"] += log_p[chosen]
        sums["rejected_log_probability"] += log_p[rejected]
        for name, key in (("chosen", chosen), ("rejected", rejected)):
            logits_NV = [model[0][x] @ model[1] for x, _ in marked[key]]
            sums[f"{name}_tokens"] += len(logits_NV)
            sums[f"{name}_logit"] += np.sum(np.mean(logits_NV, axis=1))
            right = [y == np.argmax(z) for (_, y), z in zip(marked[key], logits_NV, strict=True)]
            sums["token_accuracy"] += np.sum(right) if name == "chosen" else 0
        slope = beta * (-(1 - smoothing) * sigmoid(-margin) + smoothing * sigmoid(margin))
        for key, sign in ((chosen, 1), (rejected, -1)):
            for x, y in marked[key]:
                table_VE, head_EV = model
                dlogits_V = np.eye(V)[y] - np.exp(log_softmax(table_VE[x] @ head_EV))
                gradients[0][x] += sign * slope * head_EV @ dlogits_V
                gradients[1] += sign * slope * np.outer(table_VE[x], dlogits_V)
    count = len(pairs)
    means = {name: each / count for name, each in sums.items()}
    for name, kind in (("chosen_logit", "chosen"), ("rejected_logit", "rejected")):
        means[name] /= means[f"{kind}_tokens"]
    means["token_accuracy"] /= means["chosen_tokens"]
    return means, count, [each / count for each in gradients]


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("mesh", "microbatches", "chunk"),
    sentinels(
        [(MANY, 1, 5), (MANY, 2, None), ({}, 1, None), ({}, 4, 7)],
        lambda case: case == ({}, 1, None),
    ),
)
def test_a_step_follows_the_definition(mesh, microbatches, chunk):
    means, count, gradients = definition()
    mesh = make_mesh(**{"fsdp": 1, **mesh})
    compute = Compute(dtype="float32", loss_chunk=chunk)
    # Plain descent with rate one: the update is the gradient.
    descent = Optimizer(optax.sgd(1.0), optax.constant_schedule(1.0), as_declared)
    rows = sharding("batch seq", mesh)
    placed = jax.tree.map(lambda field: jax.device_put(field, rows), batch())
    with jax.set_mesh(mesh):
        model, reference_model = (
            jax.device_put(make(), shardings(abstract_model(make, mesh)), may_alias=False)
            for make in (policy, reference)
        )
        training = Training(descent, mesh, compute, OBJECTIVE, microbatches=microbatches)
        state = initial_state(model, training).with_reference_model(reference_model)
        before = jax.device_get(jax.tree.leaves(state.model))
        step = functools.partial(train.step, training=training)
        after, metrics = jax.jit(step)(state, placed, {})
        assert int(jax.jit(OBJECTIVE.count)(placed)) == count
    assert {name: float(metrics[name]) for name in means} == pytest.approx(means, rel=1e-5)
    assert metrics["tokens"] == batch().loss_mask.sum()
    for was, is_, expected in zip(before, jax.tree.leaves(after.model), gradients, strict=True):
        np.testing.assert_allclose(
            was - np.asarray(is_), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
        )
    jax.tree.map(np.testing.assert_array_equal, after.reference_model, reference())


@pytest.mark.several_devices
def test_pairs_of_rows_that_devices_share_are_those_of_whole_rows():
    """The order of the tokens is not that of the text."""
    whole = batch()
    values_BS = np.random.default_rng(1).normal(size=(B, S)).astype(np.float32)
    mesh, at_S = make_mesh(context=2), places(S, 2, "zigzag")
    assert not np.array_equal(at_S, np.arange(S))
    split = jax.tree.map(lambda x_BS: x_BS[:, at_S], dataclasses.replace(whole, order="zigzag"))
    placed = jax.device_put((split, values_BS[:, at_S]), sharding("batch seq", mesh))

    @jax.jit
    def found(batch, values_BS):
        pairs = Pairs.of(batch)
        return pairs.sums(values_BS)[0], pairs.counted_BS

    with jax.set_mesh(mesh):
        sums, counted_BS = jax.device_get(found(*placed))
    assert counted_BS.sum() == definition()[1]
    for b, s in np.argwhere(counted_BS):
        of_pair_S = (whole.segment_ids[b] + 1) // 2 == (whole.segment_ids[b, s] + 1) // 2
        for parity, each_BS in ((1, sums.chosen_BS), (0, sums.rejected_BS)):
            marked_S = of_pair_S & whole.loss_mask[b] & (whole.segment_ids[b] % 2 == parity)
            assert each_BS[b, s] == pytest.approx(values_BS[b, marked_S].sum(), abs=1e-5)


@dataclasses.dataclass(frozen=True)
class MeanPreference(PairedObjective):
    """-log σ(2 · (mean log π(chosen) - mean log π(rejected))), with or without a reference."""

    uses_reference = False
    metrics = property(lambda self: {"loss": Metric("nats per pair")})

    def of_pairs(self, pairs):
        (chosen_BS, rejected_BS), (of_chosen_BS, of_rejected_BS) = pairs.log_p, pairs.tokens
        means = chosen_BS / of_chosen_BS - rejected_BS / of_rejected_BS
        return {"loss": -jax.nn.log_sigmoid(2 * means)}


class WithReference(MeanPreference):
    uses_reference = True


def test_a_loss_of_ones_own_computes_a_reference_only_if_it_asks_for_one():
    found = batch()
    model = [np.asarray(each, np.float64) for each in jax.tree.leaves(policy())]
    means = {
        key: np.mean([log_softmax(model[0][x] @ model[1])[y] for x, y in marked])
        for key, marked in marked_targets(found).items()
    }
    margins = [
        2 * (mean - means[b, segment + 1])
        for (b, segment), mean in means.items()
        if segment % 2 == 1 and (b, segment + 1) in means
    ]
    sums, products = {}, {}
    for objective in (MeanPreference(), WithReference()):
        run = functools.partial(objective.sums, policy(), None, found, FLOAT32)
        products[type(objective)] = str(jax.make_jaxpr(run)()).count("dot_general")
        sums = jax.jit(run)()
        assert float(sums.loss_sum) == pytest.approx(-np.log(sigmoid(np.array(margins))).sum())
    assert products[MeanPreference] < products[WithReference]


@pytest.mark.slow
def test_a_model_that_is_its_reference_has_no_margin():
    sums = jax.jit(functools.partial(DPO().sums, compute=FLOAT32))(policy(), policy(), batch())
    pairs = int(DPO().count(batch()))
    assert float(sums.reported["loss"]) == pytest.approx(pairs * np.log(2))
    assert float(sums.reported["reward_margin"]) == float(sums.reported["reward_accuracy"]) == 0


@pytest.mark.parametrize(
    "settings", [{"beta": 0.0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}]
)
def test_senseless_settings_are_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} must be"):
        DPO(**settings)


@pytest.mark.slow
def test_adapters_drop_nothing():
    @jax.jit
    def minimised(model, key):
        return OBJECTIVE.sums(model, base(), batch(), FLOAT32, key).loss_sum

    model = adapted(dropout=0.5)
    np.testing.assert_array_equal(minimised(model, jax.random.key(2)), minimised(model, None))


@pytest.mark.parametrize("frozen_dtype", ["bfloat16", *MATRICES])
def test_the_reference_of_adapters_may_be_in_any_frozen_dtype(frozen_dtype):
    large = functools.partial(llama, vocab=V, embed=64, layers=1, heads=2, mlp=64)
    recipe = Recipe(functools.partial(lora, large, rank=2, alpha=2.0), 0, adapters(), frozen_dtype)
    DPO().check(recipe.abstract_model, None, recipe.trained)
    more = {"norms": Group(paths=("*norm.scale",))}
    others = dataclasses.replace(recipe, groups=adapters() | more)
    with pytest.raises(ValueError, match=r"switched off, but \S+norm.scale trains and is no ad"):
        DPO().check(others.abstract_model, None, others.trained)


@pytest.mark.slow
def test_the_reference_may_be_the_model_without_its_adapters():
    def loss(model, reference_model):
        sums = OBJECTIVE.sums(model, reference_model, batch(), FLOAT32)
        return sums.loss_sum, sums.reported

    found = [
        jax.jit(jax.value_and_grad(loss, has_aux=True))(adapted(), other)
        for other in (None, base())
    ]
    assert found[0][0][1]["reward_margin"] != 0
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        scale = np.abs(other).max()
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * max(scale, 1e-3))
