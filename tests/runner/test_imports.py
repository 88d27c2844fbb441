"""What a process loads before it knows that it trains."""

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_training_does_without_torch_where_it_is_installed() -> None:
    """What writes TensorBoard's files would import it, which takes seconds at every start."""
    script = "import sys, runner.training.fit; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
