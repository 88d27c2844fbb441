"""What a process loads before it knows that it trains."""

import subprocess
import sys
from pathlib import Path

import pytest

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
import runner.command_line.config_flags
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


@pytest.mark.slow
def test_training_does_without_torch_where_it_is_installed() -> None:
    """What writes TensorBoard's files would import it, which takes seconds at every start."""
    script = "import sys, runner.training.fit; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
