"""Every test sees eight CPU devices, and lmlib with its shape annotations checked."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

from jaxtyping import install_import_hook

install_import_hook("lmlib", "beartype.beartype")
