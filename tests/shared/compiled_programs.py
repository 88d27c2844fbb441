"""Keeps compiled programs of tests in the user's cache folder for their next run.

JAX tells them apart by version, XLA's flags and content; here also by the names of operations.
"""

import os
from importlib.metadata import version
from pathlib import Path

import zstandard

LARGEST = 2 * 2**30  # bytes of all of them: what all tests compile on several versions of JAX
# For programs that run once or twice: they compile in half the time, each in one piece, since
# another test keeps the other core busy. JAX 0.10 has older emitters to choose, which take less.
_UNOPTIMIZED = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *["--xla_cpu_use_fusion_emitters=false"] * version("jax").startswith("0.10."),
)
# Flags that runs add, for GPUs and for several devices. The tests' own processes use them too: JAX
# takes a program from the folder only if it was compiled with exactly the same flags.
_OF_RUNS = (
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL",
)
XLA_FLAGS = " ".join([*_UNOPTIMIZED, *_OF_RUNS])
_CHECKED = "checked"  # its modification time is the time of the last check

SETTINGS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
}


def folder_of_programs() -> Path:
    """The folder, made if need be, with whole programs in it.

    Raises:
      OSError: if it cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lmlib" / "compiled_by_tests"
    folder.mkdir(parents=True, exist_ok=True)
    tidy(folder, LARGEST)
    return folder


def tidy(folder: Path, largest: int) -> None:
    """Deletes files that a killed process wrote in part, and the oldest beyond `largest` bytes.

    JAX writes programs in place, and would warn about a partial one at each start.
    """
    checked = folder / _CHECKED
    last = checked.stat().st_mtime if checked.exists() else 0.0
    checked.touch()
    programs = {entry: entry.stat() for entry in folder.glob("*-cache")}
    for entry, status in list(programs.items()):
        if status.st_mtime >= last and not _is_whole(entry):
            entry.unlink(missing_ok=True)
            del programs[entry]
    size = sum(status.st_size for status in programs.values())
    for entry, status in sorted(programs.items(), key=lambda each: _last_use(each[1])):
        if size <= largest:
            break
        entry.unlink(missing_ok=True)
        size -= status.st_size


def _is_whole(entry: Path) -> bool:
    try:
        zstandard.decompress(entry.read_bytes())
    except zstandard.ZstdError:
        return False
    return True


def _last_use(status: os.stat_result) -> float:
    return max(status.st_atime, status.st_mtime)
