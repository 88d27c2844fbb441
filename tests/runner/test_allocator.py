"""What has been freed in a process that trains is found again by the next that asks."""

import ctypes
import json
import os
import subprocess
import sys

import pytest
from forked_processes import PATHS

from runner.jax_settings.allocator import keep_freed_memory

MIB = 64
# The page faults of a thread that takes so many MiB and frees them, the second time, as a metric.
# Half as many are taken then: what others have taken meanwhile may lie in the hole.
EXPERIMENT = f"""
import concurrent.futures
import ctypes
import resource

import fiddle as fdl
import small_experiment
from lmlib.experiment import Every

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc.argtypes = [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def taken_and_freed(size):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    address = libc.malloc(size)
    libc.memset(address, 1, size)
    libc.free(address)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def page_faults(_):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        first, second = thread.map(taken_and_freed, [{MIB} * 2**20, {MIB} * 2**19])
    return {{"page_faults": second}}


def config():
    cfg = small_experiment.config()
    cfg.validation, cfg.steps = None, 1
    cfg.actions = [fdl.Config(Every, 1, page_faults)]
    return cfg
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="of glibc alone")
def test_what_a_thread_has_freed_is_there_for_the_next(tmp_path):
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
