"""On what a benchmark runs."""

import importlib.util
import platform
from importlib.metadata import version
from pathlib import Path


def cpu_name() -> str:
    """The model of this machine's CPU, as its maker calls it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def versions() -> str:
    """Of what computes here."""
    names = ("jax", "jaxlib", "torch", "transformers", "maxtext")
    found = {name: version(name) for name in names if importlib.util.find_spec(name) is not None}
    return ", ".join(f"{name} {found[name]}" for name in found)
