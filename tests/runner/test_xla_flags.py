"""The flags that a run sets for XLA."""

import os
import subprocess
import sys

import pytest

from runner.xla_flags import (
    DETERMINISTIC,
    OVERLAP_ON_GPU,
    OVERLAP_ON_TPU,
    make_deterministic,
    overlap_communication,
)


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


def test_overlap_leaves_what_the_user_set():
    off = "--xla_gpu_enable_pipelined_all_gather=false"
    environment = {"XLA_FLAGS": off, "LIBTPU_INIT_ARGS": "--xla_tpu_mine=1"}
    overlap_communication(environment)
    given = environment["XLA_FLAGS"].split()
    assert given[0] == off
    assert set(given[1:]) == {flag for flag in OVERLAP_ON_GPU if "all_gather" not in flag}
    assert environment["LIBTPU_INIT_ARGS"].split() == ["--xla_tpu_mine=1", *OVERLAP_ON_TPU]
    again = dict(environment)
    overlap_communication(again)
    assert again == environment


@pytest.mark.parametrize(
    ("flags", "are_known"),
    [
        ((DETERMINISTIC, *OVERLAP_ON_GPU), True),
        (("--xla_gpu_no_such_flag=true",), False),
    ],
)
def test_xla_knows_them(flags, are_known):
    """It ends the process at a flag that it does not know."""
    ended = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "XLA_FLAGS": " ".join(flags)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode == 0) == are_known, ended.stderr
