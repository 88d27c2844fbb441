"""Runs whose batches have other sizes from some step on."""

import dataclasses
import json
import re

import fiddle as fdl
import jax
import numpy as np
import pytest
from byte_texts import write_texts
from forked_processes import succeeded
from small_experiment import small
from states import assert_same_bits

from experiments.base.pretraining import later_stage
from lmlib.data.batch import place
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.synthetic import Synthetic
from lmlib.metrics.log import read_metrics
from lmlib.models.families.gpt2 import gpt2
from lmlib.parallel.layout import sharding
from runner import Options, fit
from runner.errors import ConfigError, StoppedEarly
from runner.training.captures import read_capture

SIZES = [(4, 32)] * 3 + [(8, 32)] * 2 + [(8, 64)] * 2  # rows and tokens of each step
FIRST_ROWS = [0, 4, 8, 12, 20, 14, 22]  # 28 rows of 32 tokens are 14 of 64


def staged(*overrides: str, batch_size: int = 4) -> fdl.Config:
    """Seven steps of three sizes, with no checkpoint before the end."""
    sizes = (f"data.batch_size={batch_size}", "data.sequence_length=32")
    cfg = small("steps=7", "checkpoints.every=100", *sizes, *overrides)
    later_stage(cfg, 3, batch_size=2 * batch_size)
    later_stage(cfg, 0.7, sequence_length=64)
    return cfg


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(staged(), tmp_path_factory.mktemp("whole"))


def bits(state) -> list[np.ndarray]:
    """All of a state but its key."""
    return jax.tree.leaves(jax.device_get([state.step, state.model, state.optimizer, state.guard]))


@pytest.mark.slow
def test_each_step_is_one_of_a_run_with_batches_of_that_size(whole):
    experiment = fdl.build(staged())
    state, tokens = experiment.initial_state(), 0
    rows_of_mesh = sharding("batch seq", experiment.mesh)
    for step, (rows, length) in enumerate(SIZES):
        source = Synthetic(512, rows, length)
        numbers = range(FIRST_ROWS[step], FIRST_ROWS[step] + rows)
        each = [source.batch(p // rows, slice(p % rows, p % rows + 1)) for p in numbers]
        batch = jax.tree.map(lambda *parts: np.concatenate(parts), *each)
        tokens += int(batch.loss_mask.sum())
        placed = place(experiment.batches, step, rows_of_mesh)
        jax.tree.map(np.testing.assert_array_equal, placed, batch)

        alone = dataclasses.replace(experiment, data=source, later_stages=())
        program = alone.trace_step().lower().compile()
        batch = jax.device_put(batch, rows_of_mesh)
        state, metrics = program(state, batch, experiment.training.hyperparameters)
        line = whole.metrics[step]
        assert line["loss"] == metrics["loss"].item()
        assert line["tokens"] == tokens
        assert line["step_flops"] == rows * length * 6 * 512 * 16
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(rows * length)
    assert_same_bits(bits(state), bits(whole.state))


@pytest.mark.slow
@pytest.mark.parametrize("ended_after", [2, 3, 4, 6])
def test_a_staged_run_resumes_to_the_same_bits(ended_after, whole, tmp_path):
    with pytest.raises(StoppedEarly):
        fit(staged(), tmp_path, Options(stop=lambda step: step == ended_after))
    again = fit(staged(), tmp_path)
    for one, other in zip(again.metrics, whole.metrics, strict=True):
        assert [one[name] for name in ("step", "loss", "tokens", "grad_norm")] == [
            other[name] for name in ("step", "loss", "tokens", "grad_norm")
        ]
    assert_same_bits(bits(again.state), bits(whole.state))


@pytest.mark.slow
def test_moved_stages_count_as_changed_data(whole, tmp_path):
    with pytest.raises(StoppedEarly):
        fit(staged(), tmp_path, Options(stop=lambda step: step == 5))
    moved = staged()
    moved.later_stages[0].begin = 4
    with pytest.raises(ConfigError, match="batch of step 5 is not what it was"):
        fit(moved, tmp_path)
    moved.later_stages[0].begin = 3
    moved.later_stages[1].begin = 6  # not reached yet
    assert fit(moved, tmp_path).summary.steps == 7


@pytest.mark.slow
@pytest.mark.several_devices
def test_eight_devices_and_microbatches_of_a_stage_change_nothing_but_rounding(tmp_path):
    one = fit(staged(batch_size=8), tmp_path / "one")
    cfg = staged(batch_size=8)
    cfg.mesh.fsdp = 8
    cfg.later_stages[1].microbatches = 2
    assert [stage.microbatches for stage in fdl.build(cfg).stages.values()] == [1, 1, 2]
    eight = fit(cfg, tmp_path / "eight")
    found, expected = ([line["loss"] for line in each.metrics] for each in (eight, one))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def begins(*steps: float) -> fdl.Config:
    cfg = small("steps=7")
    for step in steps:
        later_stage(cfg, step, batch_size=16)
    return cfg


def changed(model=None, microbatches=None, **data) -> fdl.Config:
    cfg = staged()
    stage = cfg.later_stages[0]
    if model is not None:
        cfg.model = model
    if microbatches is not None:
        stage.microbatches = microbatches
    if data:
        sizes = {"vocab_size": 512, "batch_size": 8, "sequence_length": 32}
        stage.data = fdl.Config(Synthetic, **sizes | data)
    return cfg


SHORT = fdl.Partial(gpt2, vocab=512, embed=16, layers=1, heads=1, mlp=16, positions=48)


@pytest.mark.parametrize(
    ("cfg", "told"),
    [
        (begins(0), "here from 1 to 6; got 0"),
        (begins(7), "here from 1 to 6; got 7"),
        (begins(1.0), "here from 1 to 6; got 1.0"),
        (begins(-2), "got -2"),
        (begins(4, 2), "begins at step 2 comes after one that begins at step 4"),
        (begins(0.5, 4), "begins at step 4 comes after one that begins at step 4"),
        (changed(SHORT), "64"),
        (changed(vocab_size=600), "later_stages[0].data has token ids up to 599"),
        (changed(teacher_k=2), "has teacher_k None, but the stage from step 3 on has 2"),
        (changed(batch_size=0), "batch_size"),
        (changed(microbatches=3), "3"),
        (changed(microbatches=0), "microbatches must be at least 1, got 0"),
    ],
)
def test_stages_that_do_not_fit_are_refused_before_anything_compiles(cfg, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        fdl.build(cfg).check()


def test_a_later_stage_whose_data_ends_is_refused(tmp_path):
    write_texts(tmp_path)
    cfg, sizes = staged(), {"batch_size": 8, "sequence_length": 32, "epochs": 1}
    cfg.later_stages[0].data = fdl.Config(FlatTokens, str(tmp_path), "train", **sizes)
    with pytest.raises(ValueError, match=r"later_stages\[0\].data ends after \d batches"):
        fdl.build(cfg).check()


def test_a_trace_over_a_boundary_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="up to step 3, or from 4 on"):
        fit(staged(), tmp_path, Options(profile=range(3, 5)))


@pytest.mark.slow
def test_each_stage_is_planned_and_the_whole(tmp_path):
    file = tmp_path / "plan.json"
    done = succeeded(
        *("-m", "runner.plan", "--fdl_config=experiments/llama_84m", "--fiddler=tiny"),
        *("--fiddler=later_stage(begin=5, batch_size=16)", "--topology=cpu:1", f"--json={file}"),
        "--no_cache",
    )
    found = json.loads(file.read_text())
    assert [stage["steps"] for stage in found["stages"]] == [[1, 5], [6, 20]]
    assert [stage["batch_size"] for stage in found["stages"]] == [8, 16]
    needed = [stage["memory"]["needed"] for stage in found["stages"]]
    assert needed[0] < needed[1] == found["run"]["needed"]
    assert found["run"]["tokens"] == (5 * 8 + 15 * 16) * 64
    assert found["run"]["seconds"] is None
    assert re.search(r"^1 to 5 +8 +64 +2.56 k", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_step_of_a_later_stage_is_replayed_exactly(tmp_path):
    cfg = small("steps=12", "checkpoints.every=4", "optimizer.peak_lr=0.5", "guard.captures=9")
    cfg.guard.spike_deviations, cfg.guard.window = 0.01, 2
    later_stage(cfg, 5, batch_size=16)
    fit(cfg, tmp_path)
    lines = read_metrics(tmp_path)
    skipped = [line["step"] for line in lines if line["skipped_in_a_row"] == 1]
    captures = [read_capture(tmp_path / "captures" / str(step)) for step in skipped if step > 5]
    assert captures  # or this test shows nothing
    done = succeeded("-m", "runner.replay", captures[0].folder, "--trust_module=bigram")
    assert len(re.findall("same bits$", done.stdout, re.MULTILINE)) == 5
