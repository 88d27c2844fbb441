"""Runs whose objective needs a second model: where it comes from, and that it stays the same."""

import copy
import re
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from bigram import Bigram
from cut_short import cut_short
from states import assert_same_bits

from lmlib import hf
from lmlib.checkpoint import Checkpoints
from lmlib.data.synthetic import Synthetic
from lmlib.losses.distillation import Distillation
from lmlib.losses.dpo import DPO
from runner import fit
from runner.config import configs
from runner.errors import ConfigError

LLAMA = Path(__file__).parents[1] / "hf" / "golden" / "llama"
TWO_STEPS = ("compute.dtype=float32", "validation=None", "steps=2", "checkpoints.every=1")


def with_teacher(cfg, teacher_from):
    cfg.objective = fdl.Config(
        Distillation, teacher=copy.deepcopy(cfg.model), teacher_from=teacher_from
    )
    return cfg


def config(seed=0, fsdp=1, tensor=1):
    """A student of the smallest size, with a teacher of the same that is new."""
    overrides = (*TWO_STEPS, f"seed={seed}", f"mesh.fsdp={fsdp}", f"mesh.tensor={tensor}")
    cfg = configs.load("experiments/llama_84m", ["tiny"], overrides)
    cfg.model = fdl.Partial(Bigram, vocab=512, embed=8)
    cfg.validation = fdl.Config(Synthetic, vocab_size=512, batch_size=8, sequence_length=16, seed=1)
    cfg.evaluation.batches, cfg.evaluation.every = 1, 2
    return with_teacher(cfg, None)


def config_of_folder(teacher):
    """A student with a teacher of its own architecture, which is in a folder of Hugging Face's."""
    overrides = [f"folder={teacher}", *TWO_STEPS, "mesh.fsdp=1", "init_from=None"]
    return with_teacher(configs.load("experiments/from_hf", ["tiny"], overrides), str(teacher))


REFUSED = "compares with other weights than those"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"fsdp": 4, "tensor": 2}])
def test_a_run_with_a_teacher_resumes_bit_for_bit_and_refuses_another(mesh, tmp_path):
    whole = fit(config(**mesh), tmp_path / "run")
    killed = cut_short(tmp_path / "run", 1, tmp_path / "killed")
    with pytest.raises(ConfigError, match=REFUSED):
        fit(config(seed=1, **mesh), killed)
    resumed = fit(config(**mesh), killed)
    assert_same_bits(resumed.state, whole.state)
    lines = [
        {name: line[name] for name in ("loss", "cross_entropy", "divergence", "grad_norm")}
        for result in (resumed, whole)
        for line in result.metrics
    ]
    assert lines[:2] == lines[2:]
    log = (tmp_path / "run" / "run.log").read_text()
    assert f"divergence {lines[1]['divergence']:.4f}" in log
    assert f"distillation loss {lines[1]['loss']:.4f}  cross entropy" in log
    unit = "nats per token (0.5 · cross-entropy + 0.5 · divergence)"
    rows = whole.summary.text(tmp_path, "").splitlines()
    row = f"{whole.summary.training_loss:.4f} {unit}, last 2 steps"
    assert any(re.fullmatch(f"training distillation loss +{re.escape(row)}", each) for each in rows)
    last = whole.metrics[-1]
    half = (last["evaluation_cross_entropy"] + last["evaluation_divergence"]) / 2
    assert last["evaluation_loss"] == pytest.approx(half, rel=1e-6)
    assert f"evaluation distillation loss {last['evaluation_loss']:.4f} {unit}  cross" in log
    assert f"divergence {last['evaluation_divergence']:.4f} nats per token  over the first" in log
    row = f"validation distillation loss  {last['evaluation_loss']:.4f} {unit}, over the first 1 "
    assert any(each.startswith(row) for each in rows)
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert not any("reference_model" in name for name in checkpoints.verify(2).arrays)


@pytest.mark.slow
def test_the_teacher_of_a_folder_is_read_again_at_each_start(tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(LLAMA, folder)
    cfg = config_of_folder(folder)
    whole = fit(cfg, tmp_path / "run")
    leaves = map(jax.tree.leaves, (whole.state.reference_model, hf.load(folder)))
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, other)
    resumed = fit(cfg, cut_short(tmp_path / "run", 1, tmp_path / "killed"))
    assert_same_bits(resumed.state, whole.state)

    changed = jax.tree.map(lambda x: x * 1.001, hf.load(folder))
    shutil.rmtree(folder)
    hf.save(changed, folder)
    with pytest.raises(ConfigError, match=REFUSED):
        fit(cfg, cut_short(tmp_path / "run", 1, tmp_path / "refused"))


@pytest.mark.slow
def test_a_run_may_teach_and_another_architecture_may_not(tmp_path):
    cfg = config_of_folder(LLAMA)
    fit(cfg, tmp_path / "teacher")
    cfg.objective.teacher_from = str(tmp_path / "teacher")
    result = fit(cfg, tmp_path / "student")
    with Checkpoints(tmp_path / "teacher" / "checkpoints", read_only=True) as checkpoints:
        target = fdl.build(cfg).abstract_state().reference_model
        taught, _ = checkpoints.restore_part(2, "model", target)
    assert_same_bits(result.state.reference_model, taught)
    cfg.objective.teacher.mlp = 40
    with pytest.raises(ConfigError, match="mlp"):
        fit(cfg, tmp_path / "refused")


@pytest.mark.slow
def test_a_reference_is_read_as_a_teacher_is(tmp_path):
    cfg = config_of_folder(LLAMA)
    cfg.init_from = str(LLAMA)
    cfg.objective = fdl.Config(DPO, reference_from=str(LLAMA))
    first, second = fit(cfg, tmp_path / "run").metrics
    assert first["loss"] == pytest.approx(np.log(2))
    # Both programs round on their own: float32 of sums of log p, which are about 10.
    assert first["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert second["reward_margin"] != 0
    assert 0 < first["pairs"] < first["valid_tokens"]
