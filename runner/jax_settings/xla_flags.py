"""Settings of XLA that a run makes; what the user has set stays.

XLA reads them from XLA_FLAGS when JAX finds its devices. A flag that the user gives there, with
whatever value, is left as it is.

TPUs have their own, in LIBTPU_INIT_ARGS, and a run sets none. On v5e those that fuse gathers with
computation are libtpu's defaults. On every other generation libtpu 0.0.50 refuses them, since
results may be wrong or never come; 0.0.42 took them there all the same.
"""

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence

import jax

# Kernels without atomic additions, and none chosen by a race between candidates.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"

# GPUs launch kernels together as graphs: these, which JAX 0.11 takes by itself, and no collectives,
# which have hung others' runs after hundreds of steps; JAX 0.12 would take some of them.
GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL"
)
# Or one by one, each under its instruction's name.
WITHOUT_GRAPHS = "--xla_gpu_enable_command_buffer="

# Each CPU device does one thing after another. Without it a device may begin independent
# collectives in another order than its peers, and they wait for each other until XLA aborts, above
# all in programs that JAX 0.10 and 0.11 load from their cache, where the order is not kept.
IN_ORDER_ON_CPU = "--xla_cpu_multi_thread_eigen=false"

# Collectives are sent while GPUs compute. XLA's own defaults overlap them within a turn of a loop;
# these also begin the gathers of the next layer, and end the sums of the last one, in the turn
# before or after. XLA's optimization level O1 sets the same, and unrolls such loops once.
OVERLAP_ON_GPU = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
)

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# What may differ from process to process: where it writes and caches what it compiles, in how many
# threads it does, and its number of devices, of which `require_equal_devices` says more.
_OF_ONE_PROCESS = re.compile(
    r"--xla_(\w*dump_\w+|gpu_(load_autotune_results_from|per_fusion_autotune_cache_dir"
    r"|kernel_cache_file|cuda_data_dir|force_compilation_parallelism)"
    r"|force_host_platform_device_count)"
)


def set_gpu_flags(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks XLA to send while GPUs compute, and never in graphs; call it before JAX finds its
    devices."""
    _add((*OVERLAP_ON_GPU, GRAPHS), environment)


def keep_cpus_in_order(
    several_processes: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Keeps CPU devices from waiting for each other for ever; call it before JAX finds its devices.

    A run of one device stays as it is, and has every core.
    """
    if several_processes or _simulates_devices(environment):
        _add((IN_ORDER_ON_CPU,), environment)


def may_wait_for_ever(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JAX's devices are CPUs that nobody has told to keep their order."""
    in_order = IN_ORDER_ON_CPU in environment.get("XLA_FLAGS", "").split()
    return jax.default_backend() == "cpu" and jax.device_count() > 1 and not in_order


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks XLA for the same bits on every execution on a GPU; call it before JAX finds its devices.

    On CPUs and TPUs it changes nothing: they give the same bits anyway.
    """
    _add((DETERMINISTIC,), environment)


def launch_kernels_one_by_one(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks XLA for kernels whose traces say what each is; call it before JAX finds its devices, and
    before `set_gpu_flags`. On GPUs steps take a little longer."""
    _add((WITHOUT_GRAPHS,), environment)


def flags_of_the_run(
    environment: Mapping[str, str] = os.environ,
) -> dict[str, dict[str, str]]:
    """The flags of XLA that must be the same for all processes of a run, and their values, by the
    environment variable that has them."""
    found: dict[str, dict[str, str]] = {}
    for variable in _VARIABLES:
        given = (flag.partition("=") for flag in environment.get(variable, "").split())
        found[variable] = {
            name: value or "true"
            for name, _, value in given
            if name.startswith("--xla_") and not _OF_ONE_PROCESS.fullmatch(name)
        }
    return found


def _simulates_devices(environment: Mapping[str, str]) -> bool:
    pattern = r"--xla_force_host_platform_device_count=(\d+)"
    counts = re.findall(pattern, environment.get("XLA_FLAGS", ""))
    counts.append(environment.get("JAX_NUM_CPU_DEVICES", "1"))
    return any(count.isdecimal() and int(count) > 1 for count in counts)


def _add(flags: Sequence[str], environment: MutableMapping[str, str]) -> None:
    given = environment.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in given}
    added = [flag for flag in flags if flag.partition("=")[0] not in names]
    environment["XLA_FLAGS"] = " ".join([*given, *added])
