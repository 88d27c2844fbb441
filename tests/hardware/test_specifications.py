"""Peaks by the kinds that devices give themselves."""

import dataclasses

import pytest

from lmlib.hardware.specifications import ACCELERATORS, peak_flops


# Sources: Google's documentation, and half of NVIDIA's numbers with sparsity.
@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 624e12 / 2),
        ("NVIDIA H100 80GB HBM3", 1979e12 / 2),
        ("NVIDIA H100 PCIe", 1513e12 / 2),
        ("NVIDIA H100 NVL", 1671e12 / 2),
        ("NVIDIA H200", 1979e12 / 2),
        ("NVIDIA B200", 36e15 / 8 / 2),
        ("TPU v4", 275e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v6 lite", 918e12),
    ],
)
def test_known_devices(kind, peak):
    assert peak_flops(kind) == pytest.approx(peak, rel=1e-3)


@pytest.mark.parametrize(
    "kind", ["", "cpu", "TPU", "TPU v5 superlite", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "H100"]
)
def test_nothing_is_made_up(kind):
    assert peak_flops(kind) is None


def test_a_gpu_without_what_its_compiler_needs_is_refused():
    with pytest.raises(ValueError, match="the GPU 'h100' lacks its chip, memory or bandwidth"):
        dataclasses.replace(ACCELERATORS["h100"], chip=None)
