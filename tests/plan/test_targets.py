"""Names of hardware, and devices of it that are not there."""

import dataclasses

import pytest
from aot import needs_gpu_compiler, needs_tpu_compiler
from refusals import refusals

from lmlib.hardware.specifications import ACCELERATORS
from lmlib.plan import targets
from lmlib.plan.targets import TargetError, parse

TPUS = ("v4:2x2x2", "v5e:4x4", "2xv5e:2x2", "v5e:1x1", "v5p:2x2x1", "v6e:2x4", "7x:2x2x1")
GPUS = [f"{name}:2x4" for name, one in ACCELERATORS.items() if one.platform == "cuda"]


@pytest.mark.parametrize(
    ("text", "accelerator", "shape", "slices", "devices"),
    [
        ("v5e:16x16", "v5e", (16, 16), 1, 256),
        ("2xv5e:16x16", "v5e", (16, 16), 2, 512),
        ("v4:4x4x4", "v4", (4, 4, 4), 1, 64),
        ("7x:4x4x4", "7x", (4, 4, 4), 1, 128),  # a chip is two devices
        ("2x7x:2x2x1", "7x", (2, 2, 1), 2, 16),
        ("h100:8x8", "h100", (8, 8), 1, 64),
        ("a100-40gb:1x4", "a100-40gb", (1, 4), 1, 4),
        ("cpu:256", "cpu", (256,), 1, 256),
    ],
)
def test_a_name_is_read_and_written(text, accelerator, shape, slices, devices):
    target = parse(text)
    assert (target.accelerator.name, target.shape, target.slices) == (accelerator, shape, slices)
    assert target.device_count == devices
    assert str(target) == text


@pytest.mark.parametrize(("text", "told"), refusals(__file__, "targets"))
def test_mistakes_are_reported(text, told):
    with pytest.raises(TargetError, match=told):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(text, marks=needs_tpu_compiler) for text in TPUS),
        *(pytest.param(text, marks=needs_gpu_compiler) for text in GPUS),
    ],
)
def test_devices_that_are_not_there(text):
    _check_devices(parse(text))


@needs_gpu_compiler
def test_a_gpu_of_ones_own_is_planned_for():
    own = dataclasses.replace(
        ACCELERATORS["h100"], name="x900", device_kinds=("NVIDIA X900",), memory_bytes=10**12
    )
    _check_devices(targets.Target(own, (1, 2)))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param("2xv5e:2x2", "slice_index", marks=needs_tpu_compiler),
        pytest.param("h100:2x4", "process_index", marks=needs_gpu_compiler),
    ],
)
def test_slices_and_hosts_can_be_told_apart(text, number):
    target = parse(text)
    targets.prepare(target)
    found = [getattr(device, number) for device in target.devices()]
    assert sorted(found) == [0] * 4 + [1] * 4


def test_missing_libraries_of_rocm_are_reported(monkeypatch):
    monkeypatch.setattr(targets, "_has_cuda", lambda: False)
    with pytest.raises(TargetError, match="mi300x: that needs jax-rocm7-plugin"):
        parse("mi300x:1x8").devices()


@needs_gpu_compiler
def test_without_those_amds_cards_are_planned_by_nvidias_compiler():
    target = parse("mi300x:8")
    assert target == parse("mi300x:1x8")
    assert target.compiler.name == "b200"
    assert len(target.devices()) == 8


def test_too_few_simulated_devices_are_reported():
    with pytest.raises(TargetError, match="cpu:256 needs 256 simulated devices"):
        parse("cpu:256").devices()


def _check_devices(target: targets.Target) -> None:
    targets.prepare(target)
    devices = target.devices()
    assert len(devices) == target.device_count
    assert {device.device_kind for device in devices} <= set(target.accelerator.device_kinds)
