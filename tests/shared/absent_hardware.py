"""Devices that are not there, for tests of what is compiled for them."""

import importlib.util

import jax
import pytest

from lmlib.plan.targets import Target, parse, prepare

_PLUGINS = {"tpu": "libtpu", "cuda": "jax_cuda12_plugin"}


def absent(name: str) -> tuple[Target, list[jax.Device]]:
    """The target `name` and its devices; skips the test only where their plugin isn't installed."""
    target = parse(name)
    prepare(target)
    plugin = _PLUGINS[target.accelerator.platform]
    if importlib.util.find_spec(plugin) is None:
        pytest.skip(f"needs {plugin}")
    return target, target.devices()
