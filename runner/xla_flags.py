"""Settings of XLA that a run makes; what the user has set in XLA_FLAGS stays."""

import os
from collections.abc import MutableMapping

# Kernels without atomic additions, and none chosen by a race between candidates.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def make_deterministic(environment: MutableMapping[str, str] = os.environ) -> None:
    """Asks XLA for the same bits on every execution on a GPU; call it before JAX finds its devices.

    On CPUs and TPUs it changes nothing: they give the same bits anyway.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    name = DETERMINISTIC.partition("=")[0]
    if not any(flag.partition("=")[0] == name for flag in flags):
        environment["XLA_FLAGS"] = " ".join([*flags, DETERMINISTIC])
