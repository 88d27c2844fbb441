"""Settings of XLA that a run makes; what the user has set stays.

XLA reads them from the environment when JAX finds its devices: those of CPUs and GPUs from
XLA_FLAGS, those of TPUs from LIBTPU_INIT_ARGS. A flag that the user gives there, with whatever
value, is left as it is.
"""

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence

import jax

# Kernels without atomic additions, and none chosen by a race between candidates.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"

# Each CPU device does one thing after another. Without it a device may begin independent
# collectives in another order than its peers, and they wait for each other until XLA aborts, above
# all in programs that JAX 0.10 and 0.11 load from their cache, where the order is not kept.
IN_ORDER_ON_CPU = "--xla_cpu_multi_thread_eigen=false"

# Collectives are sent while the devices compute. XLA's own defaults overlap them within a turn of a
# loop; these also begin the gathers of the next layer, and end the sums of the last one, in the
# turn before or after.
OVERLAP_ON_GPU = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
)
OVERLAP_ON_TPU = (
    "--xla_enable_async_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
)


def overlap_communication(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks XLA to send while it computes; call it before JAX finds its devices."""
    _add("XLA_FLAGS", OVERLAP_ON_GPU, environment)
    _add("LIBTPU_INIT_ARGS", OVERLAP_ON_TPU, environment)


def keep_cpus_in_order(
    several_processes: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Keeps CPU devices from waiting for each other for ever; call it before JAX finds its devices.

    A run of one device stays as it is, and has every core.
    """
    if several_processes or _simulates_devices(environment):
        _add("XLA_FLAGS", (IN_ORDER_ON_CPU,), environment)


def may_wait_for_ever(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether JAX's devices are CPUs that nobody has told to keep their order."""
    in_order = IN_ORDER_ON_CPU in environment.get("XLA_FLAGS", "").split()
    return jax.default_backend() == "cpu" and jax.device_count() > 1 and not in_order


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks XLA for the same bits on every execution on a GPU; call it before JAX finds its devices.

    On CPUs and TPUs it changes nothing: they give the same bits anyway.
    """
    _add("XLA_FLAGS", (DETERMINISTIC,), environment)


def _simulates_devices(environment: Mapping[str, str]) -> bool:
    pattern = r"--xla_force_host_platform_device_count=(\d+)"
    counts = re.findall(pattern, environment.get("XLA_FLAGS", ""))
    counts.append(environment.get("JAX_NUM_CPU_DEVICES", "1"))
    return any(count.isdecimal() and int(count) > 1 for count in counts)


def _add(variable: str, flags: Sequence[str], environment: MutableMapping[str, str]) -> None:
    given = environment.get(variable, "").split()
    names = {flag.partition("=")[0] for flag in given}
    added = [flag for flag in flags if flag.partition("=")[0] not in names]
    environment[variable] = " ".join([*given, *added])
