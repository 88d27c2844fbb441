"""Absent devices, for tests of programs compiled for them."""

import importlib.util

import jax
import pytest

from lmlib.plan.targets import Target, parse, prepare

# Any of them compiles for the platform.
_COMPILERS = {"tpu": ("libtpu",), "cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
# For programs whose collectives are counted. The search for the quickest kernels takes long and
# changes nothing that is sent. All collectives stay in the loop over layers.
COUNTED_ON_GPUS = {
    "xla_gpu_autotune_level": 0,
    "xla_disable_hlo_passes": "collective-pipeliner-forward,collective-pipeliner-backward",
}


def can_compile(platform: str) -> bool:
    return any(map(importlib.util.find_spec, _COMPILERS[platform]))


needs_tpu_compiler = pytest.mark.skipif(not can_compile("tpu"), reason="needs lmlib[plan-tpu]")
needs_gpu_compiler = pytest.mark.skipif(not can_compile("cuda"), reason="needs lmlib[plan-gpu]")


def absent(name: str) -> tuple[Target, list[jax.Device]]:
    """The target `name` and its devices; skips the test only where no compiler is installed."""
    target = parse(name)
    prepare(target)
    platform = target.accelerator.platform
    if not can_compile(platform):
        pytest.skip(f"needs {' or '.join(_COMPILERS[platform])}")
    return target, target.devices()
