"""What devices can do at best."""

# Dense bf16 FLOP/s of one device by its exact `device_kind`: "TPU v5" is not "TPU v5 lite", and a
# slice of a GPU ("NVIDIA A100-SXM4-80GB MIG 1g.10gb") is not the GPU. NVIDIA's data sheets give
# figures "with sparsity", twice these. A JAX device of the TPUs below is one chip.
PEAK_FLOPS = {
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    # resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM5
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    # nvidia.com/en-us/data-center/h200
    "NVIDIA H200": 989e12,  # SXM5
    "NVIDIA H200 NVL": 835e12,
    # nvidia.com/en-us/data-center/hgx: 36 PFLOP/s with sparsity for eight
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,  # cloud.google.com/tpu/docs/v4
    "TPU v5 lite": 197e12,  # cloud.google.com/tpu/docs/v5e
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # cloud.google.com/tpu/docs/v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,  # cloud.google.com/tpu/docs/v6e
    "TPU v6e": 918e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device; `None` where the table has nothing, as for CPUs."""
    return PEAK_FLOPS.get(device_kind)
