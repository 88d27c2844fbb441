"""Runs with a second model: a teacher or a reference, live or stored."""

import copy
import dataclasses
import functools
import shutil
from pathlib import Path

import fiddle as fdl
import jax
import numpy as np
import pytest
from bigram import Bigram
from byte_texts import write_texts
from forked_processes import run_forked, succeeded
from run_on_bytes import write_run_on_bytes
from small_folder import assert_same_weights
from states import assert_same_bits, cut_short

from lmlib import hf
from lmlib.checkpoint import Checkpoints
from lmlib.compute import Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.teacher import read_metadata
from lmlib.data.synthetic import Synthetic
from lmlib.losses.distillation import Distillation
from lmlib.losses.dpo import DPO
from lmlib.losses.next_token import NextToken
from lmlib.parallel.mesh import make_mesh
from runner import fit
from runner.config import configs
from runner.errors import ConfigError
from runner.inference.loaded import Loaded
from runner.inference.teacher_logits import _said, cache_teacher_logits, sequences_of

LLAMA = Path(__file__).parents[2] / "hf" / "golden" / "llama"
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


REFUSED = "the reference model of the objective has changed"


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
    assert "divergence" in (tmp_path / "run" / "run.log").read_text()
    assert "distillation loss" in whole.summary.text(tmp_path, "")
    last = whole.metrics[-1]
    half = (last["evaluation_cross_entropy"] + last["evaluation_divergence"]) / 2
    assert last["evaluation_loss"] == pytest.approx(half, rel=1e-6)
    with Checkpoints(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert not any("reference_model" in name for name in checkpoints.verify(2).arrays)


@pytest.mark.slow
def test_the_teacher_of_a_folder_is_read_again_at_each_start(tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(LLAMA, folder)
    cfg = config_of_folder(folder)
    whole = fit(cfg, tmp_path / "run")
    assert_same_weights(whole.state.reference_model, hf.load(folder))
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


V, S = 258, 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes") / "data"
    write_texts(folder)
    return folder


def student(data, taught=None, *overrides):
    cfg = configs.load(
        "experiments/llama_84m", ["tiny"], [*TWO_STEPS, "mesh.fsdp=1", "microbatches=2", *overrides]
    )
    cfg.model = fdl.Partial(Bigram, vocab=V, embed=8)
    settings = {"path": str(data), "split": "train", "sequence_length": S}
    cfg.data = fdl.Config(FlatTokens, batch_size=4, teacher=taught, **settings)
    cfg.objective = fdl.Config(Distillation, weight=0.7)
    return cfg


make_teacher = functools.partial(Bigram, V, 16)


@pytest.fixture(scope="module")
def teacher():
    unknown = dict.fromkeys(field.name for field in dataclasses.fields(Loaded))
    return Loaded(
        **unknown
        | {
            "model": make_teacher(key=jax.random.key(1)),
            "mesh": make_mesh(fsdp=1),
            "compute": Compute(dtype="float32"),
            "name": "run@3",
            "end_ids": (),
        }
    )


@pytest.fixture(scope="module")
def taught(data, teacher):
    """All ids are listed."""
    folder = str(data.parent / "taught")
    ((stored_at, sequences),) = sequences_of(student(data, folder), batch_size=None).items()
    assert stored_at == folder
    metadata = cache_teacher_logits(teacher, sequences, folder, k=V)
    assert metadata == read_metadata(data.parent / "taught")
    assert metadata.teacher == "run@3" and metadata.sequences == sequences.seen
    return folder


@pytest.mark.slow
def test_a_student_learns_as_from_the_teacher_itself(data, teacher, taught):
    experiment = fdl.build(student(data, taught))
    experiment.check()
    model = fdl.build(student(data).model)(key=jax.random.key(0))
    batch, compute = experiment.data.batch(1), experiment.compute
    stored, computed = (
        jax.jit(functools.partial(objective.sums, compute=compute))(model, reference_model, batch)
        for objective, reference_model in (
            (experiment.objective, None),
            (Distillation(make_teacher, weight=0.7), teacher.model),
        )
    )
    for name in ("loss", "cross_entropy", "divergence"):
        one, other = float(stored.reported[name]), float(computed.reported[name])
        assert one == pytest.approx(other, rel=1e-3), name


@pytest.mark.slow
def test_a_mesh_changes_nothing(data, taught, tmp_path):
    split = student(data, taught, "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    split.data.batch_size, split.microbatches = 8, 2
    whole = student(data, taught)
    whole.data.batch_size = 8
    on_mesh, alone = (fit(cfg, tmp_path / name) for cfg, name in ((split, "split"), (whole, "w")))
    for one, other in zip(on_mesh.metrics, alone.metrics, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_invalid_teachers_are_refused(data, teacher, taught):
    cases = (
        (student(data), "data has no stored teacher, and"),
        (student(data, taught), "NextToken reads none"),
        (student(data, taught), "vocabulary has 258 ids and the model's 300"),
    )
    cases[1][0].objective = fdl.Config(NextToken)
    cases[2][0].model.vocab = 300
    for cfg, message in cases:
        with pytest.raises(ValueError, match=message):
            fdl.build(cfg).check()
    with pytest.raises(ConfigError, match="give --out"):
        sequences_of(student(data), None)
    sequences = sequences_of(student(data), None, "out")["out"]
    with pytest.raises(ValueError, match="knows 258 ids, but k is 259"):
        cache_teacher_logits(teacher, sequences, str(data.parent / "none"), k=259)
    with pytest.raises(FileExistsError, match="finished"):
        cache_teacher_logits(teacher, sequences, taught, k=V)
    mixed = student(data)
    mixed.data = fdl.Config(dict)
    with pytest.raises(ConfigError, match="data must be FlatTokens"):
        sequences_of(mixed, None)


def test_a_resumed_teacher_goes_on_within_a_batch(data, teacher, tmp_path):
    (sequences,) = sequences_of(student(data), None, str(tmp_path)).values()
    first = sequences.batch_size // 2 + 1
    whole, rest = (zip(*_said(teacher, sequences, 4, start), strict=True) for start in (0, first))
    for parts, later in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(np.concatenate(later), np.concatenate(parts)[first:])


@pytest.mark.slow
def test_the_command_writes_what_a_student_reads(tmp_path):
    run, _ = write_run_on_bytes(tmp_path)
    cfg = student(tmp_path / "data", str(tmp_path / "taught"))
    cfg.validation = copy.copy(cfg.data)
    cfg.validation.packed, cfg.validation.epochs = False, 1
    cfg.validation.teacher = str(tmp_path / "taught_validation")
    cfg.model = configs.load(str(run)).model
    configs.save(cfg, tmp_path / "student")
    flags = [f"--from={run}", f"--fdl_config={tmp_path / 'student'}"]
    ended = succeeded("-m", "runner.cache_teacher_logits", *flags, "--k=4")
    assert "lists 4 ids for each token" in ended.stdout
    assert run_forked("-m", "runner.cache_teacher_logits", *flags).returncode != 0  # it is finished
    unit = "nats per token (0.3 · cross-entropy + 0.7 · divergence)"
    summary = fit(cfg, tmp_path / "learned").summary
    assert summary.validation["validation_loss"].unit == unit
    assert summary.validation["validation_divergence"].value > 0
