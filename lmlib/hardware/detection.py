"""Whether this machine has accelerators, and which plugins JAX would start to look for them.

JAX starts every plugin that is installed, those for plans of absent hardware too. Without the
hardware it then begins with their errors, and waits while libtpu looks for TPUs.
"""

import os
import pkgutil
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# A driver that serves an accelerator has one of these in /dev, in a container too. Too many do no
# harm: JAX then looks for itself, as it would without us.
_DEVICE_FILES = (
    "nvidiactl",
    "nvidia[0-9]*",
    "nvmap",  # NVIDIA's Jetson
    "dxg",  # any maker's GPU under Windows
    "kfd",  # AMD
    "accel*",  # TPUs up to v4, and newer drivers of other makers
    "vfio/[!v]*",  # newer TPUs; vfio/vfio is there without any device
)
# PCI devices of Google's that every machine of its cloud may have: network and disk.
_NO_TPU = {"0x0042", "0x001f"}
# Plugins whose hardware the device files tell of. Another maker's may need none of them.
_KNOWN_PLUGINS = ("xla_cuda", "xla_rocm")


def use_cpu_if_alone() -> list[str]:
    """Keeps JAX from starting plugins that have no hardware here, and returns their names; call it
    before JAX starts its devices, which it does not.

    Leaves JAX alone, and returns none, where the user has said which platforms to start, where
    there may be an accelerator, and where a plugin of an unknown maker is installed.
    """
    import jax

    settings: Any = jax.config  # its attributes are made as it is imported
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
    """Whether this machine has a device of Google's besides the network and disk of its cloud."""
    ids = (
        ((device / "vendor").read_text().strip(), (device / "device").read_text().strip())
        for device in (devices.iterdir() if devices.is_dir() else ())
    )
    return any(vendor == "0x1ae0" and device not in _NO_TPU for vendor, device in ids)


def plugins() -> list[str]:
    """Those that JAX would start, found as JAX finds them, but not imported."""
    names = {entry.value.rpartition(".")[2] for entry in entry_points(group="jax_plugins")}
    if (package := find_spec("jax_plugins")) is not None:
        folders = package.submodule_search_locations
        names |= {module.name for module in pkgutil.iter_modules(folders)}
    if find_spec("libtpu") is not None:
        names.add("libtpu")
    return sorted(names)
