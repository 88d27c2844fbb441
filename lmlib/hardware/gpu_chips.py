"""GPUs as described to a compiler.

The numbers for NVIDIA's chips are from the CUDA C++ Programming Guide (technical specifications of
each compute capability) and the white papers of the architectures; AMD's are from the CDNA 3 white
paper.
"""

import dataclasses


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


_HOPPER = "cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }"
_BLACKWELL = "cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }"
_CDNA3 = 'rocm_compute_capability { gcn_arch_name: "gfx942:sramecc+:xnack-" }'

A100 = GpuChip(
    "cuda_compute_capability { major: 8 }", 108, 64, 1.41, 40 * 2**20, shared_memory=164 * 1024
)
H100 = GpuChip(_HOPPER, 132, 128, 1.98, 50 * 2**20, shared_memory=228 * 1024)
B200 = GpuChip(_BLACKWELL, 148, 128, 1.965, 126 * 2**20, shared_memory=228 * 1024)
MI300X = GpuChip(
    _CDNA3,
    304,
    128,
    2.1,
    4 * 2**20,
    shared_memory=64 * 1024,
    shared_memory_per_block=64 * 1024,
    reserved_shared_memory=0,
    threads_per_warp=64,
    registers=131_072,
)
