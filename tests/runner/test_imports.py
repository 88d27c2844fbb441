"""What a process loads before it knows that it trains."""

import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import EXPERIMENT

from runner.command_line.command import commands

ROOT = Path(__file__).parents[2]
HEAVY = ("datasets", "equinox", "jax", "jaxlib", "lmlib.experiment", "orbax", "tensorstore")
SCRIPT = f"""
import sys
import runner.__main__
assert runner.__main__.supervise
loaded = sorted(set({HEAVY!r}) & set(sys.modules))
assert not loaded, loaded
"""


def test_supervising_and_refusing_mistakes_do_without_jax() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    "only", [{"runner.generate", "runner.sweep"}, pytest.param(None, marks=pytest.mark.landing)]
)
def test_help_and_mistaken_flags_need_nothing_heavy(only: set[str] | None) -> None:
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
