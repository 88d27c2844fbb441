"""What has been freed in a process that trains is found again by the next that asks."""

import ctypes
import json
import os
import subprocess
import sys

import pytest
from forked_processes import PATHS

from runner.jax_settings.devices import keep_freed_memory

MIB = 320  # larger than any threshold that glibc sets by itself
# As metrics: the page faults of a program with temporaries of so many MiB, the median of its runs,
# for now and then something small lies in the hole; and those of a thread that takes half as many
# after it has freed them all.
EXPERIMENT = f"""
import concurrent.futures
import ctypes
import resource
import statistics

import fiddle as fdl
import jax
import jax.numpy as jnp
import small_experiment
from lmlib.experiment import Every

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
program = jax.jit(lambda x_NN: jnp.cumsum(x_NN, axis=1)[:, -1].sum())


def taken_and_freed(size):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    address = libc.malloc(size)
    libc.memset(address, 1, size)
    libc.free(address)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def page_faults(_):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        first, second = thread.map(taken_and_freed, [{MIB} * 2**20, {MIB} * 2**19])
    x_NN, counts = jnp.zeros(({MIB}, 2**18)), []
    for _ in range(12):
        program(x_NN).block_until_ready()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    median = statistics.median(b - a for a, b in zip(counts, counts[1:]))
    return {{"of_a_thread": second, "of_a_program": median}}


def config():
    cfg = small_experiment.config()
    cfg.validation, cfg.steps = None, 1
    cfg.actions = [fdl.Config(Every, 1, page_faults)]
    return cfg
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="of glibc alone")
def test_what_has_been_freed_is_there_for_the_next(tmp_path):
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
    few = MIB * 2**20 / os.sysconf("SC_PAGE_SIZE") / 50
    assert json.loads(line)["of_a_thread"] < few
    assert json.loads(line)["of_a_program"] < few


@pytest.mark.parametrize(
    "environment", [{"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}]
)
def test_what_the_user_has_set_stays(environment):
    assert not keep_freed_memory(environment)
