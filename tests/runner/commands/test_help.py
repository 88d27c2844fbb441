"""Commands show help, and load little before they do anything."""

import subprocess
import sys
from pathlib import Path

import fiddle as fdl
import pytest
from forked_processes import run_forked
from small_runs import EXPERIMENT

import data_tools
import runner
from lmlib.experiment import Experiment
from lmlib.storage.local_folder import local_folder
from runner.command_line.command import commands
from runner.config import configs
from runner.config.overrides import apply_override

FOLDER = Path(runner.__file__).parent


def first_line(file: Path) -> str:
    return file.read_text().removeprefix('"""').splitlines()[0]


def test_help_lists_every_command_and_every_experiment_with_its_first_line():
    ended = run_forked("-m", "runner", "--help")
    assert ended.returncode == 0
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    runs = '__name__ == "__main__"'
    files = {
        f"python -m runner.{file.stem}": file
        for file in FOLDER.glob("[!_]*.py")
        if runs in file.read_text()
    }
    assert not any("runner.errors" in line for line in lines)
    assert {"python -m runner.plan", "python -m runner.replay"} < set(files)
    files |= {f"python -m runner.{f.parent.name}": f for f in FOLDER.glob("*/__main__.py")}
    assert "python -m runner.sweep" in files
    files |= {"python -m runner": FOLDER / "__main__.py"} | configs.experiments()
    programs = Path(data_tools.__file__).parent.glob("*/__main__.py")
    prepares = {f"python -m data_tools.{file.parent.name}": file for file in programs}
    assert "python -m data_tools.pretokenize" in prepares
    files |= prepares
    assert "experiments/llama_84m" in files
    for name, file in files.items():
        assert first_line(file).endswith(".")  # and goes on in no second line
        assert f"{name} {first_line(file)}" in lines


@pytest.mark.parametrize("module", ["runner", "runner.plan"])
def test_help_shows_the_fiddlers_of_an_experiment(module):
    ended = run_forked("-m", module, "--fdl_config=experiments/llama_84m", "--help")
    assert ended.returncode == 0
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert "tiny The same experiment at a size for tests: synthetic data, seconds on a laptop." in (
        lines
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("runner", "--fdl_config=~/there.py", "--workdir=~/w"),
        ("data_tools.pretokenize", "--dataset=~/there.py", "--tokenizer=bytes", "--out=~/o"),
    ],
    ids=["runner", "data_tools"],
)
def test_all_commands_expand_the_home_folder(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ended = run_forked("-m", *arguments, environment={"HOME": str(tmp_path)})
    assert ended.returncode == 2
    assert f"{tmp_path}/there.py" in ended.stderr and "~" not in ended.stderr


def test_settings_that_are_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = fdl.Config(Experiment)
    for override in ("init_from=~/run@3", "frozen_dtype='~/quoted'"):
        apply_override(override, cfg)
    assert (cfg.init_from, cfg.frozen_dtype) == (f"{tmp_path}/run@3", "~/quoted")
    assert local_folder("~/run") == tmp_path / "run"  # as a config in Python may name it


ROOT = Path(__file__).parents[3]
HEAVY = ("datasets", "equinox", "jax", "jaxlib", "lmlib.experiment", "orbax", "tensorstore")


ALL_HEAVY = (*HEAVY, "optax", "pandas", "scipy", "tokenizers", "torch", "transformers")
SHOWN = f"""
import os, runpy, sys
import runner.command_line.flags
from fiddle import absl_flags

def heavy():
    return sorted(set({ALL_HEAVY!r}) & set(sys.modules))

assert not heavy(), heavy()
for flag, status, *modules in (["--help", 0, *sys.argv[1:]], ["--no_such_flag", 2, *sys.argv[1:]]):
    for module in modules:
        sys.stdout.flush()
        if not os.fork():
            sys.argv = [module, flag]
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                print("RESULT", module, flag, end.code == status, *heavy())
            os._exit(0)
        os.wait()
"""


@pytest.mark.parametrize(
    "only",
    [{"runner", "runner.generate", "runner.sweep"}, pytest.param(None, marks=pytest.mark.landing)],
)
def test_help_and_wrong_flags_import_nothing_heavy(only: set[str] | None) -> None:
    names = (name.removeprefix("python -m ") for name in commands())
    modules = [name for name in names if name.startswith("runner")]
    modules = [name for name in modules if only is None or name in only]
    assert len(modules) == len(only or modules) > 1
    done = subprocess.run(
        [sys.executable, "-c", SHOWN, *modules], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    expected = [f"RESULT {m} {flag} True" for flag in ("--help", "--no_such_flag") for m in modules]
    assert told == expected, done.stderr


# Features that a config asks for. A run without them must not pay for their imports.
OPTIONAL = (
    *("lmlib.adapters", "lmlib.evaluate.suite", "lmlib.generate", "lmlib.hf", "lmlib.plan"),
    *("lmlib.models.attend.context_parallel", "lmlib.models.experts", "lmlib.models.pipeline"),
    *("lmlib.profile", "lmlib.trackers", "lmlib.verdicts", "runner.weights.models"),
    *("runner.training.samples", "torch"),
)
TRAINS = f"""
import runpy, sys
try:
    runpy.run_module("runner", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 0
assert "runner.training.loop" in sys.modules
print("LOADED", sorted(each for each in sys.modules if each.startswith({OPTIONAL!r})))
"""


@pytest.mark.landing
def test_a_plain_run_loads_no_optional_feature(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAINS, *EXPERIMENT, "--fdl.steps=1", f"--workdir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("LOADED []\n"), done.stdout + done.stderr
