"""Peak performance of accelerators, and GPUs as described to a compiler (accelerators.toml).

A JAX device is one GPU or one TPU chip; for TPU 7x, one of the chip's two halves.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class GpuChip:
    """The properties that XLA needs to compile for a GPU that is not present.

    Args:
      capability: as in XLA's `GpuDeviceInfoProto`, as text.
      cores: streaming multiprocessors or compute units.
      fpus_per_core: float32 units.
      clock_ghz: maximum clock.
      l2_cache: bytes.
      shared_memory: bytes per core.
      shared_memory_per_block: bytes for a program that does not request more.
      reserved_shared_memory: bytes per core that are unavailable to blocks.
      threads_per_warp: threads that execute together.
      registers: 32-bit registers per core.
    """

    capability: str
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_cache: int
    shared_memory: int
    shared_memory_per_block: int = 48 * 1024
    reserved_shared_memory: int = 1024
    threads_per_warp: int = 32
    registers: int = 65_536


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Peak performance of one JAX device; `None` for unknown numbers.

    Args:
      name: as given to `python -m runner.plan --topology`: "h100".
      platform: "tpu", "cuda", "rocm" or "cpu".
      device_kinds: the exact `device_kind`s that JAX may report.
      flops: dense FLOP/s (or integer operations) by operand dtype, for the dtypes of the matrix
        units. Empty if unknown.
      memory_bytes: memory available to programs: on TPUs the chip's memory minus the compiler's
        part, on GPUs the card's memory.
      memory_bandwidth: bytes/s.
      link_bandwidth: bytes/s in one direction, of one ICI link, or of all NVLinks of a GPU.
      torus_dimensions: of the network of links, 2 or 3; 0 for a switch, or without links.
      network_bandwidth: bytes/s in one direction per device between slices or hosts.
      chip: the compilation target for `lmlib.plan`; required for GPUs.

    Raises:
      ValueError: for a GPU without a `chip`, memory size or memory bandwidth.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    flops: Mapping[str, float]
    memory_bytes: int | None = None
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    torus_dimensions: int = 0
    network_bandwidth: float | None = None
    chip: GpuChip | None = None

    def __post_init__(self) -> None:
        needed = self.chip, self.memory_bytes, self.memory_bandwidth
        if self.platform in ("cuda", "rocm") and None in needed:
            raise ValueError(
                f"the GPU {self.name!r} lacks its chip, memory or bandwidth: no program can be "
                "compiled for it without them"
            )


_FILE = tomllib.loads((Path(__file__).parent / "accelerators.toml").read_text())
_CHIPS = {name: GpuChip(**numbers) for name, numbers in _FILE["chips"].items()}
ACCELERATORS = {
    name: Accelerator(
        name,
        device_kinds=tuple(each.pop("device_kinds")),
        chip=_CHIPS.get(each.pop("chip", None)),
        **each,
    )
    for name, each in _FILE["accelerators"].items()
}
CPU = ACCELERATORS["cpu"]

# By the exact `device_kind`: "TPU v5" is not "TPU v5 lite", and a slice of a GPU
# ("NVIDIA A100-SXM4-80GB MIG 1g.10gb") is not the GPU.
_BY_KIND = {kind: one for one in ACCELERATORS.values() for kind in one.device_kinds}


def accelerator(device_kind: str) -> Accelerator | None:
    """Returns the accelerator with a JAX device kind; `None` if it is not in the table."""
    return _BY_KIND.get(device_kind)


def peak_flops(device_kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of one device; `None` if unknown, as for CPUs."""
    known = accelerator(device_kind)
    others: Mapping[str, float] = _FILE["bf16_flops_of_others"]
    return others.get(device_kind) if known is None else known.flops.get("bfloat16")
