"""Losses of preferences against TRL's trainers: loss, metrics and gradients of one batch.

golden/update_preferences.py makes the files.
"""

import dataclasses
import functools
import json
import operator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sentinels import sentinels
from small_folder import tensors_of

from lmlib import train
from lmlib.compute import Compute
from lmlib.data.batch import packed_batch
from lmlib.hf.load import load
from lmlib.hf.save import save
from lmlib.losses.dpo import DPO
from lmlib.losses.pairs import Chosen, PairSums, Responses, WholeBatch
from lmlib.losses.preferences.bradley_terry import BradleyTerry
from lmlib.losses.preferences.cpo import CPO
from lmlib.losses.preferences.ipo import IPO
from lmlib.losses.preferences.kto import KTO
from lmlib.losses.preferences.orpo import ORPO
from lmlib.losses.preferences.simpo import SimPO
from lmlib.optim.optimizer import Optimizer, as_declared
from lmlib.parallel.layout import sharding
from lmlib.parallel.mesh import make_mesh
from lmlib.row_order import places
from lmlib.state import Training, initial_state

GOLDEN = Path(__file__).parent / "golden/preferences"
MANY = {"fsdp": 2, "tensor": 2}
T = 25
PAIRS = {
    "dpo": DPO(beta=0.3),
    "dpo_robust": DPO(beta=0.3, label_smoothing=0.1, robust=True),
    "ipo": IPO(beta=0.3),
    "cpo": CPO(beta=0.3, weight=0.7),
    "cpo_smooth": CPO(beta=0.3, label_smoothing=0.1, weight=0.0),
    "simpo": SimPO(beta=2.0, gamma=0.7),
    "orpo": ORPO(beta=0.4),
}
NAMES = {  # TRL's names of our metrics
    "loss": "loss",
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "chosen_log_probability": "logps/chosen",
    "rejected_log_probability": "logps/rejected",
    "chosen_logit": "logits/chosen",
    "rejected_logit": "logits/rejected",
    "token_accuracy": "mean_token_accuracy",
    "cross_entropy": "nll_loss",
    "log_odds_ratio": "log_odds_ratio",
    "log_odds_chosen": "log_odds_chosen",
}


@functools.cache
def golden():
    return json.loads((GOLDEN / "values.json").read_text())


def packed(documents_of_rows, room=1):
    """A batch of rows of documents, each a prompt and a response."""
    shape = len(documents_of_rows), T
    tokens_BT, starts_BT, targets_BT = np.zeros(shape, np.int32), *np.zeros((2, *shape), bool)
    lengths_B = np.zeros(shape[0], np.int64)
    for row, documents in enumerate(documents_of_rows):
        at = 0
        for prompt, response in documents:
            starts_BT[row, at] = True
            targets_BT[row, at + len(prompt) : at + len(prompt + response)] = True
            tokens_BT[row, at : at + len(prompt + response)] = prompt + response
            at += len(prompt + response)
        lengths_B[row] = at - room
    return packed_batch(tokens_BT, starts_BT, lengths_B, targets_BT=targets_BT)


@functools.cache
def labelled():
    """Each chosen response with a label, then the one of the example before it."""
    examples, labels = golden()["examples"], golden()["labels"]
    others = [examples[i - 1][1] for i in range(len(examples))]
    both = [[(p, c), (p, o)] for (p, c, _), o in zip(examples, others, strict=True)]
    batch = packed([[each for i in row for each in both[i]] for row in golden()["rows"]])
    labels_BS = np.zeros_like(batch.loss_mask)
    for row, examples_of_row in enumerate(golden()["rows"]):
        for place, i in enumerate(examples_of_row):
            labels_BS[row, np.argmax(batch.segment_ids[row] == 2 * place + 1)] = labels[i]
    return dataclasses.replace(batch, labels=labels_BS)


@functools.cache
def pairs(room=1):
    """Two pairs in some rows, one in others; without `room` the last token is an input."""
    examples = golden()["examples"]
    rows = [[examples[i] for i in row] for row in golden()["rows"]]
    return packed([[(p, answer) for p, c, r in row for answer in (c, r)] for row in rows], room)


def reported(objective, batch, names, mesh, microbatches, tmp_path):
    """Metrics of a step, and gradients by the names of transformers' weights."""
    mesh = make_mesh(**{"fsdp": 1, **mesh})
    if mesh.shape["context"] > 1:
        at_S = places(T - 1, mesh.shape["context"], "zigzag")
        batch = dataclasses.replace(jax.tree.map(lambda x_BS: x_BS[:, at_S], batch), order="zigzag")
    placed = jax.device_put(batch, sharding("batch seq", mesh))
    descent = Optimizer(optax.sgd(1.0), optax.constant_schedule(1.0), as_declared)
    compute = Compute(dtype="float32", loss_chunk=5)
    training = Training(descent, mesh, compute, objective, microbatches=microbatches)
    policy, *references = (load(GOLDEN / name, mesh) for name in names)
    with jax.set_mesh(mesh):
        state = initial_state(policy, training)
        if references and objective.uses_reference:
            state = state.with_reference_model(references[0])
        step = functools.partial(train.gradient, training=training)
        gradients, found, count = jax.jit(step)(state, placed)
        assert int(count) == len(golden()["examples"])
    save(gradients, tmp_path / "gradients")
    by_name = tensors_of(tmp_path / "gradients/model.safetensors")
    return {name: float(each) for name, each in found.metrics.items()}, by_name


def check(name, metrics, gradients, names=NAMES):
    expected = golden()["values"][name]
    wanted = {each: expected[names[each]] for each in metrics if names.get(each) in expected}
    if name == "cpo_smooth" or name == "simpo":  # TRL computes none without a weight
        wanted.pop("cross_entropy", None)
    if name.startswith(("cpo", "simpo", "orpo")):  # TRL's means contain prompts and padding
        del wanted["chosen_logit"], wanted["rejected_logit"]
    found = {each: metrics[each] for each in wanted}
    assert len(found) >= 4 and found == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    of_cases = tensors_of(GOLDEN / "gradients.safetensors")
    begin = f"{name}:"
    of_case = {key.removeprefix(begin): x for key, x in of_cases.items() if key.startswith(begin)}
    assert of_case.keys() == gradients.keys()
    for key, expected in of_case.items():
        np.testing.assert_allclose(gradients[key], expected, rtol=1e-6, atol=1e-6, err_msg=key)


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    sentinels(
        [("orpo", {"context": 2}, 1), *((n, *at) for n in PAIRS for at in (({}, 1), (MANY, 2)))],
        lambda case: case == ("orpo", MANY, 2),
        landing=lambda case: case[1:] == (MANY, 2),
    ),
)
def test_losses_of_pairs_are_trls(name, mesh, microbatches, tmp_path):
    names = "policy", "reference"
    check(name, *reported(PAIRS[name], pairs(), names, mesh, microbatches, tmp_path))


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    sentinels(
        [("kto", {"context": 2}, 1)]
        + [(n, *at) for n in ("kto", "kto_negative") for at in (({}, 1), (MANY, 2))],
        lambda case: case == ("kto", MANY, 2),
    ),
)
def test_kto_is_trls(name, mesh, microbatches, tmp_path):
    """Its KL is positive in one case; in the other, with exchanged models, 0 is larger."""
    objective = KTO(beta=0.3, desirable_weight=1.2, undesirable_weight=0.8)
    names = ("policy", "reference") if name == "kto_negative" else ("reference", "policy")
    metrics, gradients = reported(objective, labelled(), names, mesh, microbatches, tmp_path)
    assert metrics["desirable"] == pytest.approx(4 / 6)
    check(name, metrics, gradients, NAMES | {"kl": "kl"})


@pytest.mark.slow
def test_an_evaluation_counts_each_target_once():
    """Batches of other sizes have the means of all pairs, and of all targets."""
    objective, whole = ORPO(beta=0.4), pairs()
    model = load(GOLDEN / "policy")
    batches = [jax.tree.map(operator.itemgetter(rows), whole) for rows in (slice(1), slice(1, 4))]
    run = jax.jit(lambda batch: objective.sums(model, None, batch, Compute(dtype="float32")))
    sums = [run(batch).reported for batch in batches]
    means = {name: sum(float(each[name]) for each in sums) / 6 for name in sums[0]}
    expected = golden()["values"]["orpo"]
    found = objective.means(means)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["cross_entropy"] == pytest.approx(expected["nll_loss"], rel=1e-6)


def test_a_reference_for_a_loss_without_one_is_refused():
    objective = SimPO(reference_from="a run")
    assert objective.reference_model is None
    with pytest.raises(ValueError, match="SimPO compares with no reference model, but reference_"):
        objective.check(load(GOLDEN / "policy"), None, None)


@pytest.mark.parametrize(
    ("loss", "settings", "error"),
    [
        (IPO, {"beta": 0.0}, "beta must be positive, got 0"),
        (SimPO, {"gamma": -1.0}, "gamma must not be negative"),
        (CPO, {"weight": -1.0}, "weight must not be negative"),
        (ORPO, {"beta": -1.0}, "beta must be positive, got -1"),
        (BradleyTerry, {"center": -1.0}, "center must not be negative"),
        (KTO, {"undesirable_weight": -1.0}, "undesirable_weight must not be negative"),
    ],
)
def test_senseless_settings_are_refused(loss, settings, error):
    with pytest.raises(ValueError, match=error):
        loss(**settings)


@pytest.mark.slow
def test_orpo_is_finite_for_a_certain_answer():
    one_BS = jnp.ones((1, 1))
    log_p, tokens = Responses(0 * one_BS, -3 * one_BS), Responses(one_BS, one_BS)
    whole = WholeBatch(*jnp.ones(3))
    sums = PairSums(log_p, None, tokens, tokens, log_p, Chosen(one_BS, one_BS), whole)
    assert all(np.isfinite(each).all() for each in ORPO().of_pairs(sums).values())


@pytest.mark.several_devices
@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    sentinels(
        [("reward", {"context": 2}, 1)]
        + [(n, *at) for n in ("reward", "reward_centered") for at in (({}, 1), (MANY, 2))],
        lambda case: case == ("reward_centered", MANY, 2),
    ),
)
def test_rewards_are_trls(name, mesh, microbatches, tmp_path):
    """The last token of the last document is an input, which transformers reads."""
    objective = BradleyTerry(center=0.05 if name == "reward_centered" else 0.0)
    metrics, gradients = reported(
        objective, pairs(room=0), ("reward",), mesh, microbatches, tmp_path
    )
    metrics["mean"] = (metrics["chosen_reward"] + metrics["rejected_reward"]) / 2
    names = {"loss": "loss", "accuracy": "accuracy", "margin": "margin", "mean": "mean_reward"}
    check(name, metrics, gradients, names)


def test_batches_without_labels_are_refused():
    model = load(GOLDEN / "policy")
    with pytest.raises(ValueError, match="KTO needs labels in batches: prepare the data with"):
        jax.eval_shape(lambda: KTO().sums(model, model, pairs(), Compute(dtype="float32")))


def test_a_model_without_a_score_is_refused():
    with pytest.raises(ValueError, match="BradleyTerry trains the score of a reward model"):
        BradleyTerry().check(load(GOLDEN / "policy"), None, None)
