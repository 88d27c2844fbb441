"""A model of one's own beside its experiment, outside of the repository."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import user_model
from compiled_programs import XLA_FLAGS
from forked_processes import run_forked

from lmlib import make_mesh
from lmlib.checkpoint import Checkpoints
from runner import load
from runner.config import configs
from runner.config.relaunch import relaunch_command
from runner.config.text import flattened

ROOT = Path(configs.__file__).parents[2]
EXPERIMENT = """
import fiddle as fdl
import my_model
from experiments import llama_84m

def config():
    cfg = llama_84m.config()
    llama_84m.tiny(cfg)
    cfg.model = fdl.Partial(
        my_model.Learned, vocab=512, embed=16, layers=1, heads=2, positions=64
    )
    cfg.validation, cfg.steps, cfg.mesh.fsdp = None, 1, 1
    return cfg
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """The file; what its import leaves in this process is forgotten afterwards."""
    folder = tmp_path / "my work"
    folder.mkdir()
    shutil.copy(user_model.__file__, folder / "my_model.py")
    (folder / "my_experiment.py").write_text(EXPERIMENT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder / "my_experiment.py"
    forget()


def forget():
    for name in ("my_model", "my_experiment"):
        sys.modules.pop(name, None)


def test_an_experiment_finds_the_module_beside_it(experiment):
    cfg = configs.load(str(experiment))
    assert cfg.model.__fn_or_cls__.__module__ == "my_model"


def test_the_command_to_try_next_names_the_modules_and_their_folder(
    experiment, tmp_path, monkeypatch
):
    before = list(sys.path)
    cfg = configs.load(str(experiment))
    configs.save(cfg, tmp_path / "run")
    words = shlex.split(relaunch_command(cfg, tmp_path / "run"))
    flags = [word.partition("=") for word in words if word.startswith("--")]
    assert words[:2] == ["env", f"PYTHONPATH={experiment.parent}{_kept_path()}"]
    assert [value for name, _, value in flags if name == "--trust_module"] == ["my_model"]
    assert ("--workdir", "=", f"{tmp_path / 'run'}_next") in flags

    # As in a process that the command starts.
    forget()
    monkeypatch.setattr(sys, "path", [str(experiment.parent), *before])
    given = {name: value for name, _, value in flags}
    peak_lr = given["--fdl.optimizer.peak_lr"]
    again = configs.load(
        given["--fdl_config"], (), [f"optimizer.peak_lr={peak_lr}"], trusted=["my_model"]
    )
    cfg.optimizer.peak_lr = float(peak_lr)
    assert flattened(again) == flattened(cfg)


def test_a_shipped_experiment_needs_no_trust_to_be_launched_again(tmp_path, monkeypatch):
    """But as many simulated devices as it had, for its mesh."""
    cfg = configs.load("experiments/quickstart")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=/tmp")
    cfg.optimizer.peak_lr = 6e-3
    words = shlex.split(relaunch_command(cfg, tmp_path))
    assert words[:2] == ["env", "XLA_FLAGS=--xla_force_host_platform_device_count=8"]
    assert words[3:] == [
        "-m",
        "runner",
        f"--fdl_config={tmp_path}/config.json",
        f"--workdir={tmp_path}_next",
        "--fdl.optimizer.peak_lr=2e-3",
    ]


def test_without_a_learning_rate_it_is_the_seed_that_changes(tmp_path):
    cfg = configs.load("experiments/quickstart")
    cfg.optimizer, cfg.seed = None, 3
    assert relaunch_command(cfg, tmp_path).endswith("--fdl.seed=4")


@pytest.mark.slow
def test_the_command_works_when_it_is_pasted(experiment, tmp_path):
    first = (f"--fdl_config={experiment}", "--fdl.steps", "2", f"--workdir={tmp_path / 'a run'}")
    environment = {"XLA_FLAGS": XLA_FLAGS}
    shown = run_forked("-m", "runner", *first, cwd=tmp_path, environment=environment)
    assert shown.returncode == 0, shown.stderr
    command = shown.stdout.partition("try next")[2].splitlines()[0].strip()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    pasted = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert pasted.returncode == 0, pasted.stderr
    assert "training loss" in pasted.stdout
    assert (tmp_path / "a run_next" / "result.json").is_file()


@pytest.mark.slow
def test_weights_that_no_gradient_changes_are_loaded_as_they_were_trained(
    experiment, tmp_path, monkeypatch
):
    experts = ROOT / "tests" / "outsiders" / "routed_experts.py"
    shutil.copy(experts, experiment.parent / "my_model.py")
    text = experiment.read_text()
    begin, end = text.index("    cfg.model = "), text.index("    cfg.validation")
    with_experts = "    cfg.model.feed_forward = fdl.Partial(my_model.Experts)\n"
    experiment.write_text(text[:begin] + with_experts + text[end:])
    workdir = tmp_path / "run"
    command = ("-m", "runner", f"--fdl_config={experiment}", f"--workdir={workdir}")
    shown = run_forked(*command, cwd=tmp_path, environment={"XLA_FLAGS": XLA_FLAGS})
    assert shown.returncode == 0, shown.stderr
    monkeypatch.syspath_prepend(experiment.parent)
    model = load(workdir, mesh=make_mesh(), trusted=("my_model",)).model
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        (name,) = checkpoints.names(1, "buffers")
    moved = abs(model.stack.patterns[0][0].mlp.bias)
    # By the rate times how far from even its tokens were.
    assert name == "stack.patterns.0.0.mlp.bias"
    assert moved.min() > 0 and moved.max() < 0.01


def _kept_path() -> str:
    kept = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return "".join(f"{os.pathsep}{entry}" for entry in kept)
