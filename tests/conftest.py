"""Every test sees eight CPU devices, and lmlib with its shape annotations checked."""

import os
import tempfile
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
# The second flag keeps the collectives of simulated devices in one order; see xla_flags.py.
# Most of the tests' time goes into compiling, of which the third saves half.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_multi_thread_eigen=false "
    "--xla_backend_optimization_level=0"
)
if version("jax").startswith("0.10."):  # later ones have no older emitters to choose
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# Many tests compile the same step, some of them in processes of their own.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # it is, in the processes that share the tests
    compiled = tempfile.TemporaryDirectory(prefix="compiled_by_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

from jaxtyping import install_import_hook

install_import_hook("lmlib", "beartype.beartype")
