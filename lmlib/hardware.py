"""What devices can do at best, and the share of it that a run uses."""

from collections.abc import Sequence

import jax

# Dense bf16 FLOP/s of one device, from the makers' data sheets, by `jax.Device.device_kind`.
# A kind matches the longest entry that it starts with.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM5
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # v5p
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,  # v6e
    "TPU v6e": 918e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device; `None` where the table has nothing, as for CPUs."""
    matches = [kind for kind in PEAK_FLOPS if device_kind.startswith(kind)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def mfu(
    flops_per_token: float, tokens_per_second: float, devices: Sequence[jax.Device]
) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): FLOPs that
    the model needs over FLOPs that `devices` could do; `None` where their peak is not known."""
    peaks = [peak_flops(device.device_kind) for device in devices]
    if None in peaks:
        return None
    return flops_per_token * tokens_per_second / sum(peak for peak in peaks if peak)
