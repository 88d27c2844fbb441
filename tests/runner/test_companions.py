"""Runs whose objective needs a second model: where it comes from, and that it stays the same."""

import copy
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from states import assert_same_bits

from lmlib import hf
from lmlib.checkpoint import Checkpoints
from lmlib.losses import DPO, Distillation
from runner import fit
from runner.command_line.errors import ConfigError
from runner.config import configs

GOLDEN = Path(__file__).parents[1] / "hf" / "golden"
SMALL = ("compute.dtype=float32", "validation=None", "mesh.fsdp=1", "init_from=None")


def config(teacher, *overrides, weight=0.5):
    """A student with a teacher of its own architecture, for two steps."""
    steps = ("steps=2", "checkpoint_every=1", *overrides)
    cfg = configs.load("experiments/from_hf", ["tiny"], [f"folder={teacher}", *SMALL, *steps])
    cfg.objective = fdl.Config(
        Distillation,
        teacher=copy.deepcopy(cfg.model),
        teacher_from=str(teacher),
        weight=weight,
    )
    return cfg


def without_the_last(workdir, to):
    """The workdir of a run that was killed before its second checkpoint."""
    shutil.copytree(workdir, to)
    shutil.rmtree(to / "checkpoints" / "2")
    return to


@pytest.mark.parametrize("mesh", [(1, 1), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_a_run_with_a_teacher_resumes_bit_for_bit_and_notices_another(mesh, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(GOLDEN / "llama", teacher)
    cfg = config(teacher, f"mesh.fsdp={mesh[0]}", f"mesh.tensor={mesh[1]}")
    whole = fit(cfg, tmp_path / "run")
    killed = without_the_last(tmp_path / "run", tmp_path / "killed")
    resumed = fit(cfg, killed)
    assert_same_bits(resumed.state, whole.state)
    lines = [
        {name: line[name] for name in ("loss", "cross_entropy", "divergence", "grad_norm")}
        for result in (resumed, whole)
        for line in result.metrics
    ]
    assert lines[:2] == lines[2:]
    log = (tmp_path / "run" / "run.log").read_text()
    assert f"divergence {lines[1]['divergence']:.4f}" in log
    for one, other in zip(
        *map(jax.tree.leaves, (whole.state.companion, hf.load(teacher))), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert not any("companion" in name for name in checkpoints.verify(2).arrays)

    other = jax.tree.map(lambda x: x * 1.001, hf.load(teacher))
    shutil.rmtree(teacher)
    hf.save(other, teacher)
    with pytest.raises(ConfigError, match="compares with other weights than those"):
        fit(cfg, without_the_last(tmp_path / "run", tmp_path / "changed"))


@pytest.mark.slow
def test_a_run_may_teach_and_another_architecture_may_not(tmp_path):
    cfg = config(GOLDEN / "llama")
    fit(cfg, tmp_path / "teacher")
    cfg.objective.teacher_from = str(tmp_path / "teacher")
    result = fit(cfg, tmp_path / "student")
    with Checkpoints(tmp_path / "teacher" / "checkpoints", read_only=True) as checkpoints:
        target = fdl.build(cfg).abstract_state().companion
        taught, _ = checkpoints.restore_part(2, "model", target)
    assert_same_bits(result.state.companion, taught)
    cfg.objective.teacher.mlp = 40
    with pytest.raises(ConfigError, match="mlp"):
        fit(cfg, tmp_path / "refused")


@pytest.mark.slow
def test_a_reference_is_read_as_a_teacher_is(tmp_path):
    cfg = config(GOLDEN / "llama")
    cfg.init_from = str(GOLDEN / "llama")
    cfg.objective = fdl.Config(DPO, reference_from=str(GOLDEN / "llama"))
    first, second = fit(cfg, tmp_path / "run").metrics
    assert first["loss"] == pytest.approx(np.log(2)) and first["reward_margin"] == 0
    assert second["reward_margin"] != 0
