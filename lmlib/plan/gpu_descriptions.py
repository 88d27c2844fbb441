"""What XLA must know of a GPU to compile for it without one, in the words of its target configs.

`stream_executor.GpuTargetConfigProto` has the fields. The figures are in NVIDIA's CUDA C++
Programming Guide (technical specifications of each compute capability) and in the white papers of
the architectures; those of AMD in the CDNA 3 white paper.
"""

import dataclasses

from lmlib.hardware import Accelerator

# cuDNN kernels are chosen for this version: the oldest that has all that the models here use.
_CUDNN = "major: 9 minor: 10 patch: 0"


@dataclasses.dataclass(frozen=True)
class _Chip:
    """`cores` are streaming multiprocessors or compute units; memory in bytes."""

    capability: str
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_cache: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    shared_memory_per_block_at_most: int
    threads_per_warp: int
    registers: int


def _nvidia(
    capability: str, cores: int, fpus: int, clock: float, l2_cache: int, shared: int
) -> _Chip:
    # A block may have all of a core's shared memory but one KiB.
    return _Chip(
        f"cuda_compute_capability {{ {capability} }}",
        cores,
        fpus,
        clock,
        l2_cache,
        shared,
        48 * 1024,
        shared - 1024,
        threads_per_warp=32,
        registers=65_536,
    )


_HOPPER = "major: 9 feature_extension: ACCELERATED_FEATURES"
_BLACKWELL = "major: 10 feature_extension: ACCELERATED_FEATURES"
_CHIPS = {
    "a100": _nvidia("major: 8", 108, 64, 1.41, 40 * 2**20, 164 * 1024),
    "a100-40gb": _nvidia("major: 8", 108, 64, 1.41, 40 * 2**20, 164 * 1024),
    "h100": _nvidia(_HOPPER, 132, 128, 1.98, 50 * 2**20, 228 * 1024),
    "h200": _nvidia(_HOPPER, 132, 128, 1.98, 50 * 2**20, 228 * 1024),
    "b200": _nvidia(_BLACKWELL, 148, 128, 1.965, 126 * 2**20, 228 * 1024),
    "mi300x": _Chip(
        'rocm_compute_capability { gcn_arch_name: "gfx942:sramecc+:xnack-" }',
        cores=304,
        fpus_per_core=128,
        clock_ghz=2.1,
        l2_cache=4 * 2**20,
        shared_memory_per_core=64 * 1024,
        shared_memory_per_block=64 * 1024,
        shared_memory_per_block_at_most=64 * 1024,
        threads_per_warp=64,
        registers=131_072,
    ),
}


def target_config(accelerator: Accelerator) -> str:
    """The target config of a GPU of `lmlib.hardware`, as text."""
    chip = _CHIPS[accelerator.name]
    assert accelerator.memory_bandwidth is not None
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
  shared_memory_per_core: {chip.shared_memory_per_core}
  shared_memory_per_block: {chip.shared_memory_per_block}
  shared_memory_per_block_optin: {chip.shared_memory_per_block_at_most}
  l2_cache_size: {chip.l2_cache}
  device_memory_size: {accelerator.memory_bytes}
  memory_bandwidth: {accelerator.memory_bandwidth:.0f}
}}
platform_name: "{accelerator.platform.upper()}"
dnn_version_info {{ {_CUDNN} }}
device_description_str: "{accelerator.device_kinds[0]}"
"""
