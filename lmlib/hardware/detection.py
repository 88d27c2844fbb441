"""Detects accelerators on this machine, and the plugins that JAX would start to find them.

JAX starts every installed plugin, including those installed only to plan for absent hardware.
Without the hardware it then prints their errors first, and waits while libtpu searches for TPUs.
"""

import os
import pkgutil
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Device files of accelerator drivers in /dev, also present in containers. False positives are
# harmless: JAX then searches as usual.
_DEVICE_FILES = (
    "nvidiactl",
    "nvidia[0-9]*",
    "nvmap",  # NVIDIA's Jetson
    "dxg",  # any vendor's GPU under WSL
    "kfd",  # AMD
    "accel*",  # TPUs up to v4, and newer drivers of other vendors
    "vfio/[!v]*",  # newer TPUs; vfio/vfio exists without any device
)
# Google's PCI devices that any machine in its cloud may have: network and disk.
_NO_TPU = {"0x0042", "0x001f"}
# Plugins whose hardware has these device files. Other vendors' plugins may need none.
_KNOWN_PLUGINS = ("xla_cuda", "xla_rocm")


def use_cpu_if_alone() -> list[str]:
    """Keeps JAX from starting plugins without hardware on this machine, and returns their names.

    Call it before JAX initialises its devices. It does nothing and returns an empty list if the
    user has chosen the platforms, if there may be an accelerator, or if a plugin of an unknown
    vendor is installed.
    """
    import jax

    settings: Any = jax.config  # its attributes are created on import
    found = plugins()
    if (
        settings.jax_platforms is not None
        or "PJRT_NAMES_AND_LIBRARY_PATHS" in os.environ
        or not all(name.startswith((*_KNOWN_PLUGINS, "libtpu")) for name in found)
        or has_accelerator()
    ):
        return []
    if found:
        jax.config.update("jax_platforms", "cpu")
    return found


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    return has_tpu() or any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES)


def has_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """True if this machine has a Google device other than its cloud's network and disk."""
    ids = (
        ((device / "vendor").read_text().strip(), (device / "device").read_text().strip())
        for device in (devices.iterdir() if devices.is_dir() else ())
    )
    return any(vendor == "0x1ae0" and device not in _NO_TPU for vendor, device in ids)


def plugins() -> list[str]:
    """Returns the plugins that JAX would start, found the way JAX finds them but not imported."""
    names = {entry.value.rpartition(".")[2] for entry in entry_points(group="jax_plugins")}
    if (package := find_spec("jax_plugins")) is not None:
        folders = package.submodule_search_locations
        names |= {module.name for module in pkgutil.iter_modules(folders)}
    if find_spec("libtpu") is not None:
        names.add("libtpu")
    return sorted(names)
