"""Every test sees eight CPU devices, and lmlib with its shape annotations checked."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Without the second flag XLA may start independent collectives in another order on each simulated
# device, and those wait for each other for ever (seen with JAX 0.12).
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false"
)

from jaxtyping import install_import_hook

install_import_hook("lmlib", "beartype.beartype")
