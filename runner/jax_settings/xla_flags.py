"""XLA flags that a run sets. Flags that the user has set take precedence.

XLA reads the flags from XLA_FLAGS when JAX initialises its devices.

TPUs have their own flags, in LIBTPU_INIT_ARGS, and a run sets none of them. On v5e, the flags that
fuse gathers with computation are on by default. On all other generations, libtpu 0.0.50 rejects
them, since results may be wrong or the program may hang; libtpu 0.0.42 still accepted them.
"""

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence

import jax

# Makes GPUs deterministic: no atomic additions, and fixed choices instead of autotuning.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"

# GPUs launch these kernels together as CUDA graphs. The list is the default of JAX 0.11. It has no
# collectives, which JAX 0.12 partly includes, since graphs with collectives have hung other
# people's runs after hundreds of steps.
GRAPHS = (
    "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL"
)
# Launches kernels one by one, so that a trace shows each under the name of its instruction; add it
# before `set_gpu_flags`. Steps take slightly longer.
WITHOUT_GRAPHS = "--xla_gpu_enable_command_buffer="

# Makes each CPU device run one operation at a time. Otherwise a device may start independent
# collectives in another order than its peers, and they deadlock until XLA aborts. This is most
# likely with programs from the compilation cache of JAX 0.10 and 0.11, which loses the order.
IN_ORDER_ON_CPU = "--xla_cpu_multi_thread_eigen=false"

# Keeps sums in XLA's own code. JAX 0.10 gives them to YNNPACK, which sums products of two arrays up
# to twenty times slower: a recurrent layer takes a fifth longer. JAX 0.12 no longer does.
SUMS_ON_CPU = "--xla_cpu_experimental_ynn_fusion_type=-reduce"

# Overlaps collectives with computation on GPUs. XLA's defaults overlap them within one iteration of
# a loop. These flags also start the all-gathers of the next layer one iteration early, and finish
# the reductions of the last layer one iteration late. XLA's optimization level O1 sets the same
# flags, and also unrolls such loops once.
OVERLAP_ON_GPU = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
)

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Flags that may differ between processes: folders for dumps and caches, compilation threads, and
# the number of devices, which `require_equal_devices` checks.
_OF_ONE_PROCESS = re.compile(
    r"--xla_(\w*dump_\w+|gpu_(load_autotune_results_from|per_fusion_autotune_cache_dir"
    r"|kernel_cache_file|cuda_data_dir|force_compilation_parallelism)"
    r"|force_host_platform_device_count)"
)


def add_flags(flags: Sequence[str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Adds XLA flags that are not set yet; call it before JAX initialises its devices."""
    given = environment.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in given}
    added = [flag for flag in flags if flag.partition("=")[0] not in names]
    environment["XLA_FLAGS"] = " ".join([*given, *added])


def set_gpu_flags(environment: MutableMapping[str, str] = os.environ) -> None:
    """Overlaps collectives with computation on GPUs, and keeps them out of CUDA graphs."""
    add_flags((*OVERLAP_ON_GPU, GRAPHS), environment)


def keep_cpus_in_order(
    several_processes: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Prevents deadlocks between CPU devices; a single device can still use every core."""
    pattern = r"--xla_force_host_platform_device_count=(\d+)"
    simulated = re.findall(pattern, environment.get("XLA_FLAGS", ""))
    simulated.append(environment.get("JAX_NUM_CPU_DEVICES", "1"))
    if several_processes or any(count.isdecimal() and int(count) > 1 for count in simulated):
        add_flags((IN_ORDER_ON_CPU,), environment)


def may_wait_for_ever(environment: Mapping[str, str] = os.environ) -> bool:
    """True if several CPU devices may deadlock because `IN_ORDER_ON_CPU` is not set."""
    in_order = IN_ORDER_ON_CPU in environment.get("XLA_FLAGS", "").split()
    return jax.default_backend() == "cpu" and jax.device_count() > 1 and not in_order


def flags_of_the_run(environment: Mapping[str, str] = os.environ) -> dict[str, dict[str, str]]:
    """Returns the XLA flags that all processes of a run must share.

    The result maps each environment variable to its flags and their values.
    """
    found: dict[str, dict[str, str]] = {}
    for variable in _VARIABLES:
        given = (flag.partition("=") for flag in environment.get(variable, "").split())
        found[variable] = {
            name: value or "true"
            for name, _, value in given
            if name.startswith("--xla_") and not _OF_ONE_PROCESS.fullmatch(name)
        }
    return found
