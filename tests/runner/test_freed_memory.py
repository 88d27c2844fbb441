"""Freed memory is kept: the kernel gives a process the pages of a large array only once."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading
import numpy as np
from runner.jax_settings.freed_memory import keep_freed_memory

def faults_of(megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(megabytes * 1_000_000 // 8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
found = []
def run():
    found.extend(faults_of(80) for _ in range(3))
if sys.argv[1] == "thread":
    thread = threading.Thread(target=run); thread.start(); thread.join()
else:
    run()
print(found[-1])
"""


def faults(where: str, **variables: str) -> int:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    child = subprocess.run(
        [sys.executable, "-c", FAULTS, where],
        env=environment | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(child.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_large_array_is_faulted_in_once():
    pages = 80_000_000 // os.sysconf("SC_PAGE_SIZE")
    assert faults("main") < pages / 100
    assert faults("thread") < pages / 100
    # What a user has set stays: here the array is given back, and faulted in again.
    assert faults("main", MALLOC_ARENA_MAX="4", NUMPY_MADVISE_HUGEPAGE="0") > pages / 2
