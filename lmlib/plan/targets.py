"""Hardware to plan for. It can be absent.

v5e:16x16     a slice of TPUs in this shape; v4, v5p and 7x have three dimensions
2xv5e:16x16   two such slices, joined by the data center's network
h100:8x8      hosts × GPUs of each; h100:8 is one host
cpu:256       simulated devices
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from lmlib.hardware.specifications import ACCELERATORS, Accelerator

# Chips of the largest slice on offer; docs.cloud.google.com/tpu/docs.
_LARGEST_SLICE = {"v4": 4_096, "v5e": 256, "v5p": 6_144, "v6e": 256, "7x": 9_216}
# On 7x each half of a chip is a device.
_DEVICES_PER_CHIP = {"7x": 2}
_CHIPS_OF_A_HOST = (2, 2, 1)
_MOST_DEVICES = 262_144  # their descriptions take 2 GB; more might fill the host's memory


class TargetError(ValueError):
    """The hardware does not exist, or no installed compiler supports it."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to plan for. `str()` gives the text that `parse` reads.

    Args:
      shape: of one slice of TPUs in chips; hosts × GPUs of each host; or the number of CPUs.
    """

    accelerator: Accelerator
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        slices = f"{self.slices}x" if self.slices > 1 else ""
        return f"{slices}{self.accelerator.name}:{'x'.join(map(str, self.shape))}"

    def on_network(self, bandwidth: float) -> "Target":
        """Returns the same devices with a network of `bandwidth` bytes/s per device."""
        accelerator = dataclasses.replace(self.accelerator, network_bandwidth=bandwidth)
        return dataclasses.replace(self, accelerator=accelerator)

    @property
    def device_count(self) -> int:
        per_chip = _DEVICES_PER_CHIP.get(self.accelerator.name, 1)
        return self.slices * math.prod(self.shape) * per_chip

    @property
    def compiler(self) -> Accelerator:
        """The accelerator to compile for. It is NVIDIA's of the same memory if this is AMD's and
        AMD's compiler is not installed."""
        amd = self.accelerator.platform == "rocm"
        missing = amd and importlib.util.find_spec("jax_rocm7_plugin") is None
        return ACCELERATORS["b200"] if missing and _has_cuda() else self.accelerator

    def devices(self) -> list[jax.Device]:
        """Returns devices to compile for. CPU devices can also run programs.

        Raises:
          TargetError: if the compiler's plugin is missing, the shape is impossible, or JAX started
            with fewer CPU devices (see `prepare`).
        """
        if self.accelerator.platform == "cpu":
            devices = jax.devices("cpu")
            if len(devices) < self.device_count:
                raise TargetError(
                    f"{self} needs {self.device_count} simulated devices, and JAX has started with "
                    f"{len(devices)}: call lmlib.plan.targets.prepare before anything uses JAX"
                )
            return devices[: self.device_count]
        is_tpu = self.accelerator.platform == "tpu"
        try:
            return list((self._tpu_topology() if is_tpu else self._gpu_topology()).devices)
        except RuntimeError as error:
            if isinstance(error, NotImplementedError) or "not installed" in str(error):
                raise TargetError(_no_plugin(self.accelerator)) from error
            reason = str(error).partition("\n")[0]
            raise TargetError(f"{self} is not a topology that XLA knows: {reason}") from error

    def _tpu_topology(self) -> topologies.TopologyDescription:
        options: dict[str, Any] = {}
        name = self.accelerator.name
        if name == "v4":
            options["chip_config_name"] = "megacore"  # the two cores of a chip are one device
        if self.slices > 1:
            options["num_slices"] = self.slices
        sizes = (*self.shape, 1)[:3]  # a host has fewer chips in a smaller slice
        host = tuple(map(min, sizes, _CHIPS_OF_A_HOST))
        if host != _CHIPS_OF_A_HOST:
            options["chips_per_host_bounds"] = host
        prefix = "tpu7x" if name == "7x" else name
        shape = "x".join(map(str, self.shape))
        return topologies.get_topology_desc(f"{prefix}:{shape}", "tpu", **options)

    def _gpu_topology(self) -> topologies.TopologyDescription:
        hosts, gpus = self.shape
        return topologies.get_topology_desc(
            "",
            self.compiler.platform,
            target_config=_target_config(self.compiler),
            topology=f"1x{hosts}x{gpus}",
        )


def parse(text: str) -> Target:
    """Reads a target such as "v5e:16x16"; see this module. It does not start JAX.

    Raises:
      TargetError: if the accelerator or its shape does not exist.
    """
    found = re.fullmatch(r"(?:([1-9]\d*)x)?([a-z0-9-]+):([1-9]\d*(?:x[1-9]\d*)*)", text)
    if found is None or found[2] not in ACCELERATORS:
        raise TargetError(
            f"{text!r} is not a topology: write v5e:16x16, 2xv5e:16x16 (two slices), h100:8x8 "
            f"(hosts × GPUs of each) or cpu:256; accelerators: {', '.join(ACCELERATORS)}"
        )
    accelerator = ACCELERATORS[found[2]]
    shape = tuple(map(int, found[3].split("x")))
    if accelerator.platform in ("cuda", "rocm") and len(shape) == 1:
        shape = (1, *shape)
    target = Target(accelerator, shape, int(found[1] or 1))
    dimensions = {"tpu": accelerator.torus_dimensions, "cpu": 1}.get(accelerator.platform, 2)
    if len(shape) != dimensions:
        meaning = {"tpu": "chips", "cpu": "devices"}.get(accelerator.platform, "hosts x GPUs")
        example = "x".join(["4"] * dimensions) if dimensions > 1 else "256"
        raise TargetError(
            f"{target}: {accelerator.name} takes {dimensions} number"
            f"{'s' * (dimensions > 1)} of {meaning}, like {accelerator.name}:{example}"
        )
    if accelerator.platform == "tpu" and any(size > 1 and size % 2 for size in shape[:2]):
        raise TargetError(f"{target}: a host has 2 x 2 chips, so sizes above 1 must be even")
    if target.slices > 1 and accelerator.platform != "tpu":
        raise TargetError(f"{target}: only TPUs have slices; for GPUs give more hosts")
    largest = _LARGEST_SLICE.get(accelerator.name, math.inf)
    if math.prod(shape) > largest:
        raise TargetError(
            f"{target}: the largest slice of {accelerator.name} has {largest:,} chips; plan for "
            f"several slices, like 2x{accelerator.name}:…"
        )
    if target.device_count > _MOST_DEVICES:
        raise TargetError(
            f"{target} has {target.device_count:,} devices, and plan takes at most "
            f"{_MOST_DEVICES:,}: name fewer"
        )
    return target


def prepare(target: Target) -> None:
    """Prepares JAX to compile for `target` on a CPU. Call it before JAX starts.

    It keeps settings that are in the environment already.
    """
    if target.accelerator.platform == "tpu":
        # libtpu would ask Google's metadata server for its chips, and lock them.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        # The compiler's log has the only exact count of its memory.
        os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "0")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if target.accelerator.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", target.device_count)


def _has_cuda() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def _no_plugin(accelerator: Accelerator) -> str:
    if accelerator.platform == "rocm":
        return (
            f"cannot compile for {accelerator.name}: that needs jax-rocm7-plugin, jax-rocm7-pjrt "
            "and the libraries of ROCm 7, which come with AMD's driver only; with lmlib[plan-gpu] "
            "it is planned by NVIDIA's compiler"
        )
    extra = {"tpu": "plan-tpu", "cuda": "plan-gpu"}[accelerator.platform]
    return (
        f"cannot compile for {accelerator.name}: install its compiler, pip install 'lmlib[{extra}]'"
    )


# cuDNN kernels are chosen for this version: the oldest that has all that the models here use.
_CUDNN = "9.10.0"


def _target_config(accelerator: Accelerator) -> str:
    """Returns a GpuTargetConfigProto as text: XLA needs it to compile for an absent GPU."""
    chip = accelerator.chip
    assert chip is not None and accelerator.memory_bandwidth is not None
    major, minor, patch = _CUDNN.split(".")
    return f"""
gpu_device_info {{
  {chip.capability}
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  clock_rate_ghz: {chip.clock_ghz}
  threads_per_warp: {chip.threads_per_warp}
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: {chip.registers}
  registers_per_block_limit: {chip.registers}
  shared_memory_per_core: {chip.shared_memory}
  shared_memory_per_block: {chip.shared_memory_per_block}
  shared_memory_per_block_optin: {chip.shared_memory - chip.reserved_shared_memory}
  l2_cache_size: {chip.l2_cache}
  device_memory_size: {accelerator.memory_bytes}
  memory_bandwidth: {accelerator.memory_bandwidth:.0f}
  dnn_version: "{_CUDNN}"
}}
platform_name: "{accelerator.platform.upper()}"
dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}
device_description_str: "{accelerator.device_kinds[0]}"
"""
