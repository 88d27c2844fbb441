"""Settings of XLA that a run makes; what the user has set stays.

XLA reads them from the environment when JAX finds its devices: those of CPUs and GPUs from
XLA_FLAGS, those of TPUs from LIBTPU_INIT_ARGS. A flag that the user gives there, with whatever
value, is left as it is.
"""

import os
from collections.abc import MutableMapping, Sequence

# Kernels without atomic additions, and none chosen by a race between candidates.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"

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


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks XLA for the same bits on every execution on a GPU; call it before JAX finds its devices.

    On CPUs and TPUs it changes nothing: they give the same bits anyway.
    """
    _add("XLA_FLAGS", (DETERMINISTIC,), environment)


def _add(variable: str, flags: Sequence[str], environment: MutableMapping[str, str]) -> None:
    given = environment.get(variable, "").split()
    names = {flag.partition("=")[0] for flag in given}
    added = [flag for flag in flags if flag.partition("=")[0] not in names]
    environment[variable] = " ".join([*given, *added])
