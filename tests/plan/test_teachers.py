"""A teacher costs a step its forward pass, and its weights in the compute dtype."""

import dataclasses
import functools

import jax
import outsider_runs
import pytest
from bigram import Bigram
from byte_texts import write_ids

from lmlib.adapters.lora import lora
from lmlib.compute import Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.synthetic import Synthetic
from lmlib.losses.distillation import Distillation
from lmlib.losses.dpo import DPO
from lmlib.losses.preferences.kto import KTO
from lmlib.models.families.llama import llama
from lmlib.optim.adamw import adamw
from lmlib.parallel.mesh import make_mesh
from lmlib.plan.flops import count_flops
from lmlib.plan.planner import plan
from lmlib.plan.targets import parse

pytestmark = pytest.mark.several_devices

V, ROWS, LENGTH = 128, 8, 32
student = functools.partial(llama, vocab=V, embed=16, layers=1, heads=2, mlp=32)
teacher = functools.partial(llama, vocab=V, embed=32, layers=2, heads=2, mlp=64)
# A layer has four square matrices, three of the mlp and two norms; also two tables and a norm.
PARAMETERS = 2 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 2 * V * 32 + 32
ATTENTION = 2 * 2 * 2 * LENGTH * 32  # FLOPs of scores and mixing in both layers
FORWARD = 2 * (PARAMETERS - V * 32 - 5 * 32) + ATTENTION  # not the embedding, nor norms
TAUGHT = Distillation(teacher)
ADAM = functools.partial(adamw, peak_lr=1e-3)


def experiment(model=student, **settings):
    settings = {"data": Synthetic(V, ROWS, LENGTH), "optimizer": ADAM} | settings
    return outsider_runs.experiment(model, {"fsdp": 8}, Compute(), **settings)


@pytest.mark.slow
def test_a_teacher_costs_its_forward_pass():
    taught = experiment(objective=TAUGHT)
    added = taught.flops_per_token(causal=False) - experiment().flops_per_token(causal=False)
    assert added == pytest.approx(FORWARD)
    steps = (each.trace_step() for each in (taught, experiment()))
    counted = [count_flops(step.jaxpr, ()).total for step in steps]
    assert counted[0] - counted[1] == pytest.approx(FORWARD * ROWS * LENGTH)


@pytest.mark.landing
def test_ktos_microbatches_cost_a_forward_pass_of_both_models():
    found = []
    for microbatches in (1, 2):
        run = outsider_runs.experiment(
            teacher, {"fsdp": 4}, Compute(), data=Synthetic(V, ROWS, LENGTH, labels=True),
            optimizer=ADAM, objective=KTO(reference_from="a run"), microbatches=microbatches,
        )  # fmt: skip
        counted = count_flops(run.trace_step().jaxpr, ())
        found.append((run.flops_per_token(causal=False), counted))
    (analytic, once), (with_kl, whole) = found
    assert with_kl - analytic == pytest.approx(2 * FORWARD)
    assert whole.of("forward") - once.of("forward") == pytest.approx(2 * FORWARD * ROWS * LENGTH)
    assert whole.total - once.total == pytest.approx(2 * FORWARD * ROWS * LENGTH)


def test_a_reference_without_adapters_has_none_of_their_flops():
    adapted = experiment(functools.partial(lora, teacher, rank=4, alpha=8.0), objective=DPO())
    assert DPO().flops_per_token(adapted.recipe.shapes, LENGTH, False) == pytest.approx(FORWARD)


@pytest.mark.slow
def test_a_plan_counts_its_memory():
    target = parse("cpu:8")
    taught = experiment(objective=TAUGHT)
    taught = dataclasses.replace(taught, mesh=make_mesh(fsdp=8, devices=target.devices()))
    report = plan(taught, target)
    assert report.memory.reference_model == 2 * PARAMETERS // 8
    assert "the objective's second model, frozen" in str(report)
    arguments = report.memory.parameters + report.memory.optimizer_state + report.memory.batch
    arguments += report.memory.reference_model
    assert arguments <= report.memory.counted.arguments < arguments + 1000


def test_a_reference_model_that_does_not_fit_is_refused():
    of = functools.partial(experiment, functools.partial(Bigram, V, 8))
    with pytest.raises(ValueError, match="vocabulary has 64 ids and the model's 128"):
        of(objective=Distillation(functools.partial(Bigram, 64, 8))).check()
    with pytest.raises(ValueError, match=r"switched off, but \S+ trains and is no adapter"):
        of(objective=DPO()).check()
    of(objective=DPO(reference_from="a run")).check()
    with pytest.raises(ValueError, match="compares with the weights of a run: give them"):
        of(objective=DPO(reference_from="a run")).initial_state()


def test_it_is_kept_in_the_compute_dtype_and_not_in_checkpoints():
    taught = Distillation(functools.partial(Bigram, V, 8))
    state = experiment(functools.partial(Bigram, V, 8), objective=taught).abstract_state()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.reference_model)} == {"bfloat16"}
    assert state.changing.reference_model is None


def test_preferences_need_pairs_of_answers(tmp_path):
    write_ids(tmp_path, [[1] * 70], vocab_size=V)
    text = FlatTokens(str(tmp_path), "train", batch_size=ROWS, sequence_length=LENGTH)
    of = functools.partial(experiment, functools.partial(Bigram, V, 8), data=text)
    of().check()
    with pytest.raises(ValueError, match="data holds no pairs of answers, and DPO needs them"):
        of(objective=DPO(reference_from="a run")).check()
