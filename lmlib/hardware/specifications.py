"""Peak performance of accelerators, from their vendors' documents.

A JAX device is one GPU or one TPU chip; for TPU 7x, one of the chip's two halves.
"""

import dataclasses
from collections.abc import Mapping

from lmlib.hardware import gpu_chips


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Peak performance of one JAX device.

    Args:
      name: as given to `python -m runner.plan --topology`: "h100".
      platform: "tpu", "cuda", "rocm" or "cpu".
      device_kinds: the exact `device_kind`s that JAX may report.
      flops: dense FLOP/s (or integer operations) by operand dtype, for the dtypes of the matrix
        units. Empty if unknown.
      memory_bytes: memory available to programs: on TPUs the chip's memory minus the compiler's
        part, on GPUs the card's memory. `None` if unknown.
      memory_bandwidth: bytes/s. `None` if unknown.
      link_bandwidth: bytes/s in one direction, of one ICI link, or of all NVLinks of a GPU. `None`
        if unknown, or without links.
      torus_dimensions: of the network of links, 2 or 3; 0 for a switch, or without links.
      network_bandwidth: bytes/s in one direction per device between slices or hosts. `None` if
        unknown.
      chip: the compilation target for `lmlib.plan`; required for GPUs.

    Raises:
      ValueError: for a GPU without a `chip`, memory size or memory bandwidth.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    flops: Mapping[str, float]
    memory_bytes: int | None
    memory_bandwidth: float | None
    link_bandwidth: float | None
    torus_dimensions: int
    network_bandwidth: float | None
    chip: gpu_chips.GpuChip | None = None

    def __post_init__(self) -> None:
        needed = self.chip, self.memory_bytes, self.memory_bandwidth
        if self.platform in ("cuda", "rocm") and None in needed:
            raise ValueError(
                f"the GPU {self.name!r} lacks its chip, memory or bandwidth: no program can be "
                "compiled for it without them"
            )


_GIB = 2**30

# TPUs. FLOP/s, HBM bandwidth, ICI and data center network of each chip are from
# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. Their ICI figures cover all links in both
# directions; for one link in one direction they are divided by 8 on a 2D torus and by 12 on a 3D
# one. Memory is the limit in the out-of-memory error of libtpu 0.0.42.
_TPUS = (
    Accelerator(
        name="v4",
        platform="tpu",
        device_kinds=("TPU v4",),
        flops={"bfloat16": 275e12, "int8": 275e12},
        memory_bytes=int(30.75 * _GIB),
        memory_bandwidth=1_228e9,
        link_bandwidth=50e9,
        torus_dimensions=3,
        network_bandwidth=6.25e9,  # jax-ml.github.io/scaling-book/tpus
    ),
    Accelerator(
        name="v5e",
        platform="tpu",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        flops={"bfloat16": 197e12, "int8": 393e12},
        memory_bytes=int(15.75 * _GIB),
        memory_bandwidth=819e9,
        link_bandwidth=50e9,
        torus_dimensions=2,
        network_bandwidth=3.125e9,  # 6.4 Tbit/s for a pod of 256
    ),
    Accelerator(
        name="v5p",
        platform="tpu",
        device_kinds=("TPU v5", "TPU v5p"),
        flops={"bfloat16": 459e12, "int8": 918e12},
        memory_bytes=int(95.74 * _GIB),
        memory_bandwidth=2_765e9,
        link_bandwidth=100e9,
        torus_dimensions=3,
        network_bandwidth=6.25e9,
    ),
    Accelerator(
        name="v6e",
        platform="tpu",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        flops={"bfloat16": 918e12, "int8": 1_836e12, "float8_e4m3fn": 918e12},
        memory_bytes=int(31.25 * _GIB),
        memory_bandwidth=1_638e9,
        link_bandwidth=100e9,
        torus_dimensions=2,
        network_bandwidth=12.5e9,
    ),
    # Half of each figure of a chip: its two devices share its links.
    Accelerator(
        name="7x",
        platform="tpu",
        device_kinds=("TPU7x", "TPU v7x"),
        flops={"bfloat16": 2_307e12 / 2, "float8_e4m3fn": 4_614e12 / 2},
        memory_bytes=int(94.75 * _GIB),
        memory_bandwidth=7_380e9 / 2,
        link_bandwidth=50e9,
        torus_dimensions=3,
        network_bandwidth=6.25e9,
    ),
)

# NVIDIA. Its data sheets give FLOP/s "with sparsity" and NVLink in both directions, both twice
# these numbers. Memory is as reported by CUDA. The network is one adapter per GPU, as in NVIDIA's
# DGX of that generation: 200 Gbit/s for A100, 400 Gbit/s for later ones.
_CUDA_GPUS = (
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf
    Accelerator(
        name="a100",
        platform="cuda",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        flops={"bfloat16": 312e12, "int8": 624e12},
        memory_bytes=85_100_068_864,
        memory_bandwidth=2_039e9,
        link_bandwidth=300e9,
        torus_dimensions=0,
        network_bandwidth=25e9,
        chip=gpu_chips.A100,
    ),
    Accelerator(
        name="a100-40gb",
        platform="cuda",
        device_kinds=("NVIDIA A100-SXM4-40GB",),
        flops={"bfloat16": 312e12, "int8": 624e12},
        memory_bytes=42_298_834_944,
        memory_bandwidth=1_555e9,
        link_bandwidth=300e9,
        torus_dimensions=0,
        network_bandwidth=25e9,
        chip=gpu_chips.A100,
    ),
    # resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    Accelerator(
        name="h100",
        platform="cuda",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        flops={"bfloat16": 989e12, "int8": 1_979e12, "float8_e4m3fn": 1_979e12},
        memory_bytes=84_942_979_072,
        memory_bandwidth=3_350e9,
        link_bandwidth=450e9,
        torus_dimensions=0,
        network_bandwidth=50e9,
        chip=gpu_chips.H100,
    ),
    # nvidia.com/en-us/data-center/h200
    Accelerator(
        name="h200",
        platform="cuda",
        device_kinds=("NVIDIA H200",),
        flops={"bfloat16": 989e12, "int8": 1_979e12, "float8_e4m3fn": 1_979e12},
        memory_bytes=150_110_011_392,
        memory_bandwidth=4_800e9,
        link_bandwidth=450e9,
        torus_dimensions=0,
        network_bandwidth=50e9,
        chip=gpu_chips.H100,
    ),
    # nvidia.com/en-us/data-center/hgx, for eight: bf16 36 PFLOP/s and fp8 72 PFLOP/s, with sparsity
    Accelerator(
        name="b200",
        platform="cuda",
        device_kinds=("NVIDIA B200",),
        flops={"bfloat16": 2_250e12, "int8": 4_500e12, "float8_e4m3fn": 4_500e12},
        memory_bytes=191_514_411_008,
        memory_bandwidth=8_000e9,
        link_bandwidth=900e9,
        torus_dimensions=0,
        network_bandwidth=50e9,
        chip=gpu_chips.B200,
    ),
)

# amd.com/en/products/accelerators/instinct/mi300/mi300x.html, without sparsity. Infinity Fabric
# joins each GPU to seven others, with 64 GB/s in each direction to each of them.
_ROCM_GPUS = (
    Accelerator(
        name="mi300x",
        platform="rocm",
        device_kinds=("AMD Instinct MI300X",),
        flops={"bfloat16": 1_307e12, "int8": 2_615e12, "float8_e4m3fnuz": 2_615e12},
        memory_bytes=192 * _GIB,
        memory_bandwidth=5_300e9,
        link_bandwidth=7 * 64e9,
        torus_dimensions=0,
        network_bandwidth=50e9,
        chip=gpu_chips.MI300X,
    ),
)

CPU = Accelerator(
    name="cpu",
    platform="cpu",
    device_kinds=("cpu",),
    flops={},
    memory_bytes=None,
    memory_bandwidth=None,
    link_bandwidth=None,
    torus_dimensions=0,
    network_bandwidth=None,
)

ACCELERATORS = {one.name: one for one in (*_TPUS, *_CUDA_GPUS, *_ROCM_GPUS, CPU)}

# Cards without fixed links between them; plans cannot use them.
_BF16_FLOPS_OF_OTHERS = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200 NVL": 835e12,
}

# By the exact `device_kind`: "TPU v5" is not "TPU v5 lite", and a slice of a GPU
# ("NVIDIA A100-SXM4-80GB MIG 1g.10gb") is not the GPU.
_BY_KIND = {kind: one for one in ACCELERATORS.values() for kind in one.device_kinds}


def accelerator(device_kind: str) -> Accelerator | None:
    """Returns the accelerator with a JAX device kind; `None` if it is not in the table."""
    return _BY_KIND.get(device_kind)


def peak_flops(device_kind: str) -> float | None:
    """Returns the dense bf16 FLOP/s of one device; `None` if unknown, as for CPUs."""
    known = accelerator(device_kind)
    if known is not None:
        return known.flops.get("bfloat16")
    return _BF16_FLOPS_OF_OTHERS.get(device_kind)
