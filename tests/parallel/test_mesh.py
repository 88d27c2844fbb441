import jax
import numpy as np
import pytest
from aot import absent, needs_gpu_compiler, needs_tpu_compiler
from refusals import refusals

from lmlib.parallel.mesh import MeshError, make_mesh
from lmlib.parallel.mesh_axes import NAMES

pytestmark = pytest.mark.several_devices


def used(mesh):
    """Returns the axes with several devices."""
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def test_axes_always_exist_and_are_explicit():
    mesh = make_mesh(fsdp=4, tensor=2)
    assert tuple(mesh.shape) == NAMES
    assert used(mesh) == {"fsdp": 4, "tensor": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, {}),
        ({"fsdp": -1}, {"fsdp": 8}),
        ({"data": 2, "fsdp": -1, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"fsdp": 2, "expert": -1}, {"fsdp": 2, "expert": 4}),
        ({"tensor": 4}, {"tensor": 4}),
        ({"fsdp": 2, "context": -1}, {"fsdp": 2, "context": 4}),
    ],
)
def test_minus_one_takes_every_device_left(sizes, shape):
    mesh = make_mesh(**sizes)
    assert used(mesh) == shape
    assert len(set(mesh.devices.flat)) == mesh.size


@needs_tpu_compiler
@pytest.mark.parametrize(
    ("sizes", "shape", "slices"),
    [
        ({"fsdp": -1}, {"data": 2, "fsdp": 4}, [[0], [1]]),
        ({"data": -1, "tensor": 2}, {"data": 4, "tensor": 2}, [[0], [0], [1], [1]]),
        ({"data": 1, "fsdp": -1}, {"fsdp": 8}, [[0, 1]]),
        ({"data": 1, "stage": 2, "fsdp": 4}, {"stage": 2, "fsdp": 4}, [[0, 1]]),
        ({"expert": -1}, {"data": 2, "expert": 4}, [[0], [1]]),
    ],
)
def test_data_spans_slices_and_then_fsdp(sizes, shape, slices):
    _, devices = absent("2xv5e:2x2")
    mesh = make_mesh(**sizes, devices=devices)
    assert used(mesh) == shape
    held = [sorted({device.slice_index for device in row.flat}) for row in mesh.devices]
    assert held == slices
    for stage in np.moveaxis(mesh.devices, 1, 0) if mesh.shape["stage"] > 1 else []:
        assert len({device.slice_index for device in stage.flat}) == 1


@needs_tpu_compiler
@pytest.mark.parametrize(
    "sizes", [{"data": 1, "tensor": -1}, {"data": 1, "expert": -1}, {"data": 3, "fsdp": 2}]
)
def test_slices_without_an_equal_part_are_reported(sizes):
    _, devices = absent("2xv5e:2x2")
    with pytest.raises(MeshError, match=r"does not divide among 2 slices.*data be a multiple of 2"):
        make_mesh(**sizes, devices=devices)


@needs_gpu_compiler
def test_hosts_of_gpus_do_not_change_the_mesh():
    _, devices = absent("h100:2x4")
    assert used(make_mesh(fsdp=-1, devices=devices)) == {"fsdp": 8}


@pytest.mark.parametrize(("sizes", "message"), refusals(__file__, "meshes"))
def test_impossible_meshes_say_what_would_work(sizes, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(**sizes)
