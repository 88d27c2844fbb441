"""JAX and XLA settings of a run: flags, numbers, the compilation cache and memory."""

import ctypes
import os
import signal
import subprocess
import sys
from functools import partial
from tempfile import TemporaryFile

import fiddle as fdl
import jax
import pytest
from forked_processes import fresh_process
from small_runs import SmallRun

from runner.config.configs import load
from runner.jax_settings.determinism import check_determinism
from runner.jax_settings.devices import keep_freed_memory
from runner.jax_settings.numbers import changes, settings_of_numbers
from runner.jax_settings.xla_flags import (
    DETERMINISTIC,
    GRAPHS,
    IN_ORDER_ON_CPU,
    OVERLAP_ON_GPU,
    SUMS_ON_CPU,
    WITHOUT_GRAPHS,
    add_flags,
    flags_of_the_run,
    keep_cpus_in_order,
    set_gpu_flags,
)
from runner.processes.endings import STOPPED


@pytest.mark.parametrize(
    ("change", "given", "added"),
    [
        (partial(add_flags, (DETERMINISTIC,)), "--xla_a=1", {DETERMINISTIC}),
        (partial(add_flags, (WITHOUT_GRAPHS,)), "--xla_gpu_enable_command_buffer=FUSION", set()),
        (set_gpu_flags, "--xla_a=1", {*OVERLAP_ON_GPU, GRAPHS}),
        (set_gpu_flags, WITHOUT_GRAPHS, {*OVERLAP_ON_GPU}),
    ],
)
def test_flags_are_added_and_override_nothing(change, given, added):
    environment = {"XLA_FLAGS": given, "LIBTPU_INIT_ARGS": "--xla_tpu_mine=1"}
    for _ in range(2):
        change(environment)
        first, *others = environment["XLA_FLAGS"].split()
        assert first == given and sorted(others) == sorted(added)
    assert environment["LIBTPU_INIT_ARGS"] == "--xla_tpu_mine=1"


@pytest.mark.parametrize(
    ("environment", "several_processes", "added"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, False, False),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, False, True),
        ({"JAX_NUM_CPU_DEVICES": "2"}, False, True),
        ({"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true"}, True, False),
    ],
)
def test_several_cpu_devices_run_in_order(environment, several_processes, added):
    before = environment.get("XLA_FLAGS", "").split()
    after = dict(environment)
    keep_cpus_in_order(several_processes, after)
    assert after.get("XLA_FLAGS", "").split() == [*before, *[IN_ORDER_ON_CPU][: int(added)]]


@pytest.mark.landing
@pytest.mark.parametrize(
    ("flags", "are_known"),
    [
        ((DETERMINISTIC, IN_ORDER_ON_CPU, SUMS_ON_CPU, *OVERLAP_ON_GPU), True),
        (("--xla_gpu_no_such_flag=true",), False),
    ],
)
def test_xla_knows_the_flags(flags, are_known):
    """An unknown flag ends the process."""
    ended = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env={**os.environ, "XLA_FLAGS": " ".join(flags)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode == 0) == are_known, ended.stderr


def test_flags_that_must_be_the_same_for_all_processes():
    """Folders for dumps and the number of simulated devices may differ."""
    own = [
        "--xla_dump_to=/tmp/of_process_3",
        "--xla_gpu_dump_autotune_results_to=/tmp/of_process_3",
        "--xla_gpu_load_autotune_results_from=/tmp/of_process_3",
        "--xla_gpu_force_compilation_parallelism=4",
        "--xla_force_host_platform_device_count=2",
    ]
    flags = ["--xla_b=1", "--xla_cpu_enable_fast_math", *own, "--xla_a=x", "--xla_b=2"]
    environment = {"XLA_FLAGS": " ".join(flags), "LIBTPU_INIT_ARGS": "--port=1 --xla_tpu_a=1"}
    assert flags_of_the_run(environment) == {
        "XLA_FLAGS": {"--xla_a": "x", "--xla_b": "2", "--xla_cpu_enable_fast_math": "true"},
        "LIBTPU_INIT_ARGS": {"--xla_tpu_a": "1"},
    }
    assert not any(flags_of_the_run({}).values())


@pytest.mark.parametrize("source", ["data", "validation"])
@pytest.mark.parametrize(
    ("attention", "whole_rows", "flags", "platform", "refused"),
    [
        ("cudnn", False, DETERMINISTIC, "gpu", True),
        ("auto", True, DETERMINISTIC, "gpu", True),
        ("auto", True, "--xla_gpu_exclude_nondeterministic_ops", "gpu", True),
        ("auto", False, DETERMINISTIC, "gpu", False),
        ("triton", True, DETERMINISTIC, "gpu", False),
        ("auto", True, "--xla_gpu_deterministic_ops=false", "gpu", False),
        ("auto", True, DETERMINISTIC, "cpu", False),
    ],
)
def test_nondeterministic_attention_is_refused(
    source, attention, whole_rows, flags, platform, refused
):
    cfg = load("experiments/llama_84m", ["tiny"])
    cfg.compute.attention = attention
    experiment = fdl.build(cfg)
    getattr(experiment, source).whole_rows = whole_rows
    given = {"XLA_FLAGS": flags}, platform
    if not refused:
        check_determinism(experiment, *given)
        return
    with pytest.raises(ValueError, match=r"add --fdl\.compute\.attention=triton"):
        check_determinism(experiment, *given)


def test_the_setting_of_cublas_is_reported(monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    before = settings_of_numbers()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert changes(before, settings_of_numbers()) == "NVIDIA_TF32_OVERRIDE was unset and is 0"


PROGRAM = """
import jax
from runner.jax_settings.compilation_cache import keep_compiled_programs
folder = keep_compiled_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.jit(lambda x: x @ x)(jax.numpy.ones((4, 4)))
print(folder)
"""


def ended(**changed):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_CACHE", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=kept | {"JAX_PLATFORMS": "cpu"} | changed,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.landing
@pytest.mark.parametrize(
    ("variable", "below"), [("XDG_CACHE_HOME", "lmlib/compiled"), ("HOME", ".cache/lmlib/compiled")]
)
def test_programs_are_cached_in_the_users_cache_folder(tmp_path, variable, below):
    assert ended(**{variable: str(tmp_path)}).stdout.strip() == str(tmp_path / below)
    assert list((tmp_path / below).iterdir())


@pytest.mark.landing
def test_several_cpu_devices_have_a_cache_since_jax_0_12(tmp_path):
    """Programs from the cache of older versions may deadlock."""
    two = "--xla_force_host_platform_device_count=2"
    found = ended(XDG_CACHE_HOME=str(tmp_path), XLA_FLAGS=two).stdout.strip()
    kept = tmp_path / "lmlib" / "compiled"
    assert found == (str(kept) if jax.__version_info__ >= (0, 12) else "None")
    assert kept.exists() == (found != "None")


def test_the_cache_folder_of_the_user_takes_precedence(tmp_path):
    home, own = tmp_path / "home", tmp_path / "own"
    assert ended(HOME=str(home), JAX_COMPILATION_CACHE_DIR=str(own)).stdout.strip() == str(own)
    assert list(own.iterdir())
    assert not home.exists()


@pytest.mark.slow
def test_without_a_writable_folder_nothing_is_cached():
    made = ended(XDG_CACHE_HOME="/proc/nowhere")
    assert made.stdout.strip() == "None"
    (told,) = [line for line in made.stderr.splitlines() if "compiled programs" in line]
    assert "/proc/nowhere/lmlib/compiled cannot be written" in told
    assert "/proc/nowhere" not in made.stderr.replace(told, "")


@pytest.mark.slow
def test_simulated_devices_do_not_deadlock_in_a_cached_program(tmp_path):
    """JAX 0.10 and 0.11 lose the order of the collectives in it. With this scheduler, and without
    `IN_ORDER_ON_CPU`, a run like the second was aborted after 27 to 119 steps."""
    settings = ("mesh.fsdp=4", "mesh.tensor=2", "steps=150", "checkpoints.every=150")
    experiment = ("--fdl_config=experiments/llama_84m", "--fiddler=tiny", "--fdl.validation=None")
    environment = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 "
        "--xla_cpu_enable_concurrency_optimized_scheduler=false --xla_backend_optimization_level=1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept"),
    }

    def begun(name):
        return SmallRun(tmp_path / name, *settings, experiment=experiment, environment=environment)

    compiling = begun("compiling")
    compiling.wait_for("step 1/150")
    compiling.send(signal.SIGTERM)
    assert compiling.exit_code() == STOPPED, compiling.output()
    with_kept_program = begun("with_kept_program")
    assert with_kept_program.exit_code() == 0, with_kept_program.output()


# Prints the page faults of a thread that allocates less than another has freed.
FREED = """
import concurrent.futures, ctypes, resource
from runner.jax_settings.devices import keep_freed_memory

keep_freed_memory({})
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def page_faults(size):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    address = libc.malloc(size)
    libc.memset(address, 1, size)
    libc.free(address)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

with concurrent.futures.ThreadPoolExecutor(1) as thread:
    print(*thread.map(page_faults, [320 << 20, 160 << 20]))
"""


@pytest.mark.landing
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_freed_memory_is_reused():
    with TemporaryFile("w+") as out:
        assert fresh_process("-c", FREED, stdout=out, stderr=out).wait(60) == 0
        out.seek(0)
        first, second = map(int, out.read().split())
    assert second < first / 50


@pytest.mark.parametrize(
    "environment", [{"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}]
)
def test_malloc_settings_of_the_user_take_precedence(environment):
    assert not keep_freed_memory(environment)


# Prints the threads of the library that JAX's QR decomposition uses.
DECOMPOSED = """
import ctypes, re, jax, jax.numpy as jnp
from runner.jax_settings.devices import start_devices

start_devices()
jax.block_until_ready(jax.jit(jnp.linalg.qr)(jnp.ones((64, 64))))
maps = open("/proc/self/maps").read()
library = re.search(r"/.*/scipy.libs/libscipy_openblas-.*", maps)
print(ctypes.CDLL(library[0]).scipy_openblas_get_num_threads() if library else 0)
"""


@pytest.mark.landing
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux")
@pytest.mark.skipif((os.cpu_count() or 1) == 1, reason="OpenBLAS has one thread for each core")
@pytest.mark.parametrize(("given", "threads"), [(None, 1), ("2", 2)])
def test_lapack_has_one_thread_unless_the_user_gives_it_more(given, threads):
    environment = {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": given}
    with TemporaryFile("w+") as out:
        process = fresh_process("-c", DECOMPOSED, stdout=out, stderr=out, environment=environment)
        assert process.wait(120) == 0
        out.seek(0)
        found = int(out.read())
    if found == 0:
        pytest.skip("this build of SciPy has no OpenBLAS of its own")
    assert found == threads
