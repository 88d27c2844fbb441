"""The setting for the same bits on GPUs."""

import os
import subprocess
import sys

import pytest

from runner.xla_flags import DETERMINISTIC, make_deterministic


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, DETERMINISTIC),
        ("--xla_a=1", f"--xla_a=1 {DETERMINISTIC}"),
        ("--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
    ],
)
def test_it_is_added_and_overrides_nothing(before, after):
    environment = {} if before is None else {"XLA_FLAGS": before}
    make_deterministic(environment)
    assert environment["XLA_FLAGS"] == after


def test_xla_knows_it():
    """It ends the process at a flag that it does not know."""
    for flag, is_known in ((DETERMINISTIC, True), ("--xla_gpu_no_such_flag=true", False)):
        ended = subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            env={**os.environ, "XLA_FLAGS": flag},
            capture_output=True,
            text=True,
        )
        assert (ended.returncode == 0) == is_known, ended.stderr
