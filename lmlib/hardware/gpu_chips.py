"""GPUs as a compiler sees them.

The figures of NVIDIA's chips are in its CUDA C++ Programming Guide (technical specifications of
each compute capability) and in the white papers of the architectures; those of AMD's in the CDNA 3
white paper.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GpuChip:
    """What XLA must know of a GPU to compile for it without one.

    Args:
      capability: as XLA's `GpuDeviceInfoProto` has it, in text.
      cores: streaming multiprocessors or compute units.
      fpus_per_core: of float32.
      clock_ghz: the highest.
      l2_cache: bytes.
      shared_memory: bytes, of one core.
      shared_memory_per_block: bytes, of a program that asks for no more.
      reserved_shared_memory: bytes of a core that no block can have.
      threads_per_warp: threads that go together.
      registers: of one core, of 32 bits.
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
