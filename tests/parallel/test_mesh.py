import jax
import pytest

from lmlib.parallel.mesh import MeshError, make_mesh

pytestmark = pytest.mark.several_devices


def test_axes_always_exist_and_are_explicit():
    mesh = make_mesh(fsdp=4, tensor=2)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 1, 1)),
        ({"fsdp": -1}, (1, 8, 1)),
        ({"data": 2, "fsdp": -1, "tensor": 2}, (2, 2, 2)),
        ({"tensor": 4}, (1, 1, 4)),
    ],
)
def test_minus_one_takes_every_device_left(sizes, shape):
    mesh = make_mesh(**sizes)
    assert tuple(mesh.shape.values()) == shape
    assert len(set(mesh.devices.flat)) == mesh.size


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 16}, "needs 16 devices and there are 8.*device_count=16 "),
        ({"fsdp": 3, "tensor": -1}, "8 devices do not divide by 3"),
        ({"fsdp": -1, "tensor": -1}, "only one size may be -1, not fsdp and tensor"),
        ({"data": 0}, "each size must be at least 1"),
    ],
)
def test_impossible_meshes_say_what_would_work(sizes, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(**sizes)
