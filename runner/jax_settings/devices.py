"""Chooses and starts JAX's devices, with clear errors if they cannot start."""

import ctypes
import logging
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from logging.handlers import BufferingHandler

import jax

from lmlib.hardware.detection import has_accelerator, plugins, use_cpu_if_alone
from runner.errors import ConfigError
from runner.jax_settings.compilation_cache import keep_compiled_programs
from runner.jax_settings.xla_flags import SUMS_ON_CPU, add_flags, keep_cpus_in_order

# Parameters of mallopt(3) and their values. Only blocks of 2 GiB or more, the largest threshold
# that mallopt accepts, return to the kernel. All threads share one arena, since arenas of other
# threads are limited to 64 MiB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 2**31 - 1, _ARENA_MAX: 1}


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Makes malloc keep freed memory for reuse; call it before any thread starts.

    Arenas of existing threads stay in use, also for later threads.

    Returns:
      True if the settings were made. They need glibc, and the user's own malloc settings take
      precedence.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*each) for each in _SETTINGS.items()])


def start_devices() -> None:
    """Chooses and starts JAX's devices and compilation cache, for a command of one process.

    Raises ConfigError if JAX cannot start the devices.
    """
    choose_devices()
    keep_cpus_in_order(several_processes=False)
    check_devices()
    keep_compiled_programs()


def choose_devices() -> None:
    """Makes JAX use the CPU if there is no accelerator; call it before JAX starts.

    A warning is printed to stderr if the libraries for running on NVIDIA GPUs are installed, as
    with lmlib[cuda12], but no GPU is found. Plugins that only serve planning cause no warning.
    Raises ConfigError if two plugins for NVIDIA GPUs are installed, since JAX can load only one.
    """
    if not on_cpus_alone():
        check_one_cuda_plugin()
    else:
        # Threads of OpenBLAS wait for each other in loops. On a busy machine the decompositions of
        # SOAP and Shampoo took most of a step.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if jax.__version_info__ < (0, 11):
            add_flags((SUMS_ON_CPU,))
    left_out = use_cpu_if_alone()
    # JAX needs cuDNN on NVIDIA GPUs, and lmlib[plan-gpu] lacks it.
    runs_on_gpus = find_spec("nvidia") is not None and find_spec("nvidia.cudnn") is not None
    if runs_on_gpus and any(name.startswith("xla_cuda") for name in left_out):
        print(
            "WARNING: no accelerator was found; using the CPU without JAX's plugins "
            f"{', '.join(left_out)} (JAX_PLATFORMS=cuda or tpu uses them anyway)",
            file=sys.stderr,
            flush=True,
        )


def on_cpus_alone() -> bool:
    """True if JAX will use CPUs and not look for other devices."""
    return os.environ.get("JAX_PLATFORMS", "cuda" if has_accelerator() else "cpu") == "cpu"


def check_one_cuda_plugin() -> None:
    """Raises ConfigError if plugins for two CUDA versions are installed: JAX can load only one."""
    cuda = [name for name in plugins() if name.startswith("xla_cuda")]
    if len(cuda) > 1:
        raise ConfigError(
            f"the JAX plugins {' and '.join(cuda)} are installed, and JAX can load one of them: "
            "keep the one for your driver's CUDA; for CUDA 13, pip uninstall jax-cuda12-plugin "
            "jax-cuda12-pjrt, which lmlib[plan-gpu] and lmlib[test] bring, and plan without them"
        )


def check_devices() -> None:
    """Starts JAX's devices.

    JAX's log messages, such as tracebacks of plugins, are shown only if the devices start.
    Otherwise the error contains the reason.
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
        asked = advice = ""
        if platforms := os.environ.get("JAX_PLATFORMS"):
            asked, advice = f" of JAX_PLATFORMS={platforms}", "; unset it, or set it to cpu"
        raise ConfigError(f"JAX cannot start the devices{asked}: {reason}{advice}") from error
    finally:
        logger.removeHandler(held_back)
        logger.propagate = propagates
        for record in held_back.buffer:
            logging.getLogger().handle(record)
