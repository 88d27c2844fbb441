"""Other meshes of the same devices."""

from jax.sharding import Mesh

from lmlib.parallel.mesh import make_mesh, slices_of
from lmlib.parallel.mesh_axes import NAMES


def with_fewer_copies(mesh: Mesh) -> Mesh | None:
    """Weights rest split over all devices of a slice, instead of in copies that `data` holds;
    `None` if there are no copies, or each is a slice's."""
    sizes = dict(mesh.shape)
    slices = len(slices_of(mesh.devices.flat))
    copies = slices if sizes["data"] % slices == 0 else 1
    if sizes["data"] == copies:
        return None
    return remade(mesh, data=copies, fsdp=sizes["data"] * sizes["fsdp"] // copies)


def with_smaller_parts(mesh: Mesh) -> Mesh | None:
    """Twice as much tensor parallelism, for which half as many devices share the batch; `None` if
    their number is odd."""
    sizes = dict(mesh.shape)
    halved = next((axis for axis in ("fsdp", "data", "expert") if sizes[axis] % 2 == 0), None)
    if halved is None:
        return None
    return remade(mesh, **{halved: sizes[halved] // 2, "tensor": 2 * sizes["tensor"]})


def remade(mesh: Mesh, **changed: int) -> Mesh:
    """With these sizes of some axes."""
    sizes = {**mesh.shape, **changed}
    own = {axis: sizes.pop(axis) for axis in NAMES}
    return make_mesh(**own, devices=list(mesh.devices.flat), others=sizes)
