"""Steps on CPUs find the memory again that those before have freed."""

import ctypes
import json
import os
import subprocess
import sys

import pytest
from forked_processes import PATHS

from runner.jax_settings.allocator import keep_freed_memory

MIB = 64
# The fewest page faults of a program with temporaries of so many MiB, as a metric: some runs of it
# find none of what those before have freed, but without the setting none ever does.
EXPERIMENT = f"""
import resource

import fiddle as fdl
import jax
import jax.numpy as jnp
import small_experiment
from lmlib.experiment import Every

program = jax.jit(lambda x_NN: jnp.cumsum(x_NN, axis=1)[:, -1].sum())


def page_faults(_):
    x_NN, counts = jnp.zeros(({MIB}, 2**18)), []
    for _ in range(80):
        program(x_NN).block_until_ready()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return {{"page_faults": min(b - a for a, b in zip(counts, counts[1:]))}}


def config():
    cfg = small_experiment.config()
    cfg.validation, cfg.steps = None, 1
    cfg.actions = [fdl.Config(Every, 1, page_faults)]
    return cfg
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="of glibc alone")
def test_what_a_step_has_freed_is_there_for_the_next(tmp_path):
    (tmp_path / "counted.py").write_text(EXPERIMENT)
    arguments = [f"--fdl_config={tmp_path / 'counted.py'}", f"--workdir={tmp_path / 'run'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "runner", *arguments],
        env=os.environ | {"PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["page_faults"] < MIB * 2**20 / os.sysconf("SC_PAGE_SIZE") / 50


@pytest.mark.parametrize(
    "environment", [{"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}]
)
def test_what_the_user_has_set_stays(environment):
    assert not keep_freed_memory(environment)
