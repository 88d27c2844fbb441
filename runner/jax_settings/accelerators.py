"""Whether this machine has accelerators, and what a run tells JAX if it has none.

JAX starts every plugin that is installed, those of `python -m runner.plan` too, whose hardware need
not be there. A run then begins with their errors, and waits while libtpu looks for TPUs.
"""

import logging
import os
import pkgutil
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from logging.handlers import BufferingHandler
from pathlib import Path

import jax

from runner.command_line.errors import ConfigError

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


def use_cpu_if_alone() -> None:
    """Keeps JAX from starting plugins that have no hardware here; call it before JAX starts.

    Leaves JAX alone where the user has set JAX_PLATFORMS, where there may be an accelerator, and
    where a plugin of an unknown maker is installed. Says so on stderr if it does anything.

    Raises:
      ConfigError: if JAX would start two plugins for NVIDIA GPUs, which it cannot.
    """
    plugins = _plugins()
    if os.environ.get("JAX_PLATFORMS", "cuda" if has_accelerator() else "cpu") != "cpu":
        check_one_cuda_plugin()
    if (
        "JAX_PLATFORMS" in os.environ
        or "PJRT_NAMES_AND_LIBRARY_PATHS" in os.environ
        or not plugins
        or not all(name.startswith((*_KNOWN_PLUGINS, "libtpu")) for name in plugins)
        or has_accelerator()
    ):
        return
    jax.config.update("jax_platforms", "cpu")
    print(
        f"no accelerator is to be seen on this machine: JAX uses the CPU, and not its plugins "
        f"{', '.join(plugins)} (JAX_PLATFORMS=cuda or tpu has it look all the same)",
        file=sys.stderr,
        flush=True,
    )


def check_one_cuda_plugin() -> None:
    """Raises ConfigError if plugins for two versions of CUDA are installed: JAX can load one."""
    cuda = [name for name in _plugins() if name.startswith("xla_cuda")]
    if len(cuda) > 1:
        raise ConfigError(
            f"the JAX plugins {' and '.join(cuda)} are installed, and JAX can load one of them: "
            "keep the one for your driver's CUDA; for CUDA 13, pip uninstall jax-cuda12-plugin "
            "jax-cuda12-pjrt, which lmlib[plan-gpu] and lmlib[test] bring, and plan without them"
        )


def check_devices() -> None:
    """Starts JAX's devices; raises ConfigError if it cannot, as with JAX_PLATFORMS=cuda here.

    What JAX logs meanwhile, such as the tracebacks of plugins, is shown only if some device starts:
    else the error says why none does.
    """
    logger, held_back = logging.getLogger("jax"), BufferingHandler(sys.maxsize)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(held_back)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        raised = [record.exc_info[1] for record in held_back.buffer if record.exc_info]
        held_back.buffer.clear()
        reasons = [str(each).partition("\n")[0] for each in (error, *raised)]
        reason = next(filter(None, reasons), "it finds none of them")
        platforms = os.environ.get("JAX_PLATFORMS")
        asked = f" of JAX_PLATFORMS={platforms}" if platforms else ""
        advice = "; unset JAX_PLATFORMS, or set it to cpu" if platforms else ""
        raise ConfigError(f"JAX cannot start the devices{asked}: {reason}{advice}") from error
    finally:
        logger.removeHandler(held_back)
        logger.propagate = propagates
        for record in held_back.buffer:
            logging.getLogger().handle(record)


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    return has_tpu() or any(any(devices.glob(pattern)) for pattern in _DEVICE_FILES)


def has_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether this machine has a device of Google's besides the network and disk of its cloud."""
    ids = (
        ((device / "vendor").read_text().strip(), (device / "device").read_text().strip())
        for device in (devices.iterdir() if devices.is_dir() else ())
    )
    return any(vendor == "0x1ae0" and device not in _NO_TPU for vendor, device in ids)


def _plugins() -> list[str]:
    """Those that JAX would start, found as JAX finds them, but not imported."""
    names = {entry.value.rpartition(".")[2] for entry in entry_points(group="jax_plugins")}
    if (package := find_spec("jax_plugins")) is not None:
        folders = package.submodule_search_locations
        names |= {module.name for module in pkgutil.iter_modules(folders)}
    if find_spec("libtpu") is not None:
        names.add("libtpu")
    return sorted(names)
