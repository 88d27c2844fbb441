"""Forks: runs that continue from a step of another run."""

import dataclasses
import functools
import shutil

import fiddle as fdl
import pytest
from folder_contents import files_of
from small_experiment import small
from states import assert_same_bits

from lmlib.checkpoint.manifest import read_manifest, read_notes
from lmlib.optim.power import warmup_power_decay
from lmlib.optim.schedules import warmup_constant, warmup_stable_decay
from lmlib.optim.trainable import Group
from runner import Options, fit
from runner.errors import ConfigError, StoppedEarly

STABLE = ("checkpoints.every=2", "checkpoints.keep=9", "guard.spike_deviations=9.0")


def experiment(*overrides, schedule=warmup_constant, **numbers):
    cfg = small(*STABLE, *overrides)
    cfg.optimizer.schedule = fdl.Partial(schedule, warmup=1, **numbers)
    return cfg


def decayed(*overrides, schedule=warmup_stable_decay):
    return experiment(*overrides, schedule=schedule, decay=2)


def of(workdir, step):
    return Options(init_from=f"{workdir}@{step}", continue_optimizer=True)


@pytest.fixture(scope="module")
def stable(tmp_path_factory):
    """Six steps at one learning rate, and their workdir."""
    workdir = tmp_path_factory.mktemp("stable")
    return fit(experiment("steps=6"), workdir), workdir


def learned(result):
    """Returns the metrics of each step that training determines."""
    names = ("step", "loss", "grad_norm", "learning_rate", "tokens")
    return [{name: line[name] for name in names} for line in result.metrics]


SCHEDULES = warmup_stable_decay, warmup_power_decay


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_budgets_of_one_run_are_as_if_each_was_trained_alone(schedule, tmp_path):
    level = functools.partial(experiment, schedule=schedule, decay=0)
    fit(level("steps=6"), tmp_path / "stable")
    for steps in (4, 7):
        alone = fit(decayed(f"steps={steps}", schedule=schedule), tmp_path / f"alone{steps}")
        forks = decayed(f"steps={steps}", schedule=schedule)
        forks.init_from, forks.continue_optimizer = f"{tmp_path / 'stable'}@2", True
        forked = fit(forks, tmp_path / f"fork{steps}")
        assert_same_bits(forked.state, alone.state)
        rates = [line["learning_rate"] for line in forked.metrics]
        assert rates[-1] < rates[0]


@pytest.mark.slow
def test_a_fork_that_was_stopped_needs_the_other_run_no_more(stable, tmp_path, capsys):
    _, workdir = stable
    other = shutil.copytree(workdir, tmp_path / "other")
    whole = fit(decayed("steps=5"), tmp_path / "whole", of(workdir, 2))
    options = Options(init_from=f"{other}@2", continue_optimizer=True, stop=lambda step: step == 3)
    with pytest.raises(StoppedEarly):
        fit(decayed("steps=5"), tmp_path / "fork", options)
    shutil.rmtree(other)
    shutil.rmtree(tmp_path / "fork/checkpoints/3")  # as if it had been killed before it saved
    resumed = fit(decayed("steps=5"), tmp_path / "fork", Options())
    assert_same_bits(resumed.state, whole.state)
    assert learned(resumed) == learned(whole)
    finished = fit(decayed("steps=5"), tmp_path / "fork", Options())
    assert learned(finished) == learned(whole)
    assert "has lost the lines" not in capsys.readouterr().err
    for step in (2, 4, 5):
        folder = tmp_path / f"fork/checkpoints/{step}"
        origin = read_notes(folder, read_manifest(folder))["forked_from"]
        assert origin == {"checkpoints": str(other / "checkpoints"), "step": 2}


@pytest.mark.slow
@pytest.mark.several_devices
def test_a_fork_may_have_another_mesh_and_other_microbatches(stable, tmp_path):
    result, workdir = stable
    other = fit(experiment("steps=6", "mesh.fsdp=4", "microbatches=2"), tmp_path, of(workdir, 4))
    for one, another in zip(learned(other), learned(result)[4:], strict=True):
        assert one == pytest.approx(another, rel=0.01)


@pytest.mark.slow
def test_a_fork_trains_the_same_part(tmp_path):
    """Checkpoints leave frozen weights out; here the seed of the forked run makes them."""

    def in_part(*overrides):
        cfg = experiment("frozen_dtype='bfloat16'", *overrides)
        cfg.trainable = {"out": fdl.Config(Group, paths=("head*",))}
        return cfg

    result = fit(in_part("steps=4"), tmp_path / "stable")
    fork = fit(in_part("steps=4", "seed=5"), tmp_path / "fork", of(tmp_path / "stable", 2))
    assert_same_bits(fork.state, result.state)
    assert learned(fork) == learned(result)[2:]
    assert fork.summary.tokens == result.summary.tokens
    assert_same_bits(fork.state.frozen, result.state.frozen)


@pytest.mark.parametrize(
    ("override", "step", "message"),
    [
        ("steps=9", 3, "no whole checkpoint at step 3; it has [2, 4, 6]"),
        ("steps=4", 4, "has made 4 steps, and steps is 4, which includes them"),
        ("steps=9", None, "name it, as in init_from="),
        ("data.seed=5", 4, "was trained on other data"),
        ("model.embed=32", 4, "model.embed changed since "),
        ("optimizer.first_moment_dtype=bfloat16", 4, "bfloat16[512, 16] is wanted"),
        ("guard.spike_deviations=None", 4, "holds another model or optimizer"),
    ],
)
def test_impossible_forks_are_refused(stable, tmp_path, override, step, message):
    _, workdir = stable
    named = Options(
        init_from=str(workdir) if step is None else f"{workdir}@{step}", continue_optimizer=True
    )
    before = files_of(workdir)
    with pytest.raises(ConfigError) as error:
        fit(experiment("steps=9", override), tmp_path / "run", named)
    assert message in str(error.value)
    assert files_of(workdir) == before
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.slow
def test_a_stage_of_other_batches_and_rows_is_a_fork_that_resumes_as_any_run(stable, tmp_path):
    result, workdir = stable
    stage = experiment("steps=7", "data.batch_size=4", "data.sequence_length=32")
    allowed = Options(init_from=f"{workdir}@4", continue_optimizer=True, allowed_changes=["data"])
    whole = fit(stage, tmp_path / "whole", allowed)
    tokens, data = result.metrics[3]["tokens"], fdl.build(stage.data)
    for step, line in zip((5, 6, 7), whole.metrics, strict=True):
        batch = data.batch(step - 1)
        assert batch.tokens.shape == (4, 32)
        tokens += batch.loss_mask.sum()
        assert (line["step"], line["tokens"]) == (step, tokens)
    with pytest.raises(StoppedEarly):
        fit(stage, tmp_path / "cut", dataclasses.replace(allowed, stop=lambda step: step == 5))
    resumed = fit(stage, tmp_path / "cut")
    assert_same_bits(resumed.state, whole.state)
    assert learned(resumed) == learned(whole)
