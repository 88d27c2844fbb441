"""Other meshes of the same devices."""

import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from lmlib.parallel.axes import M, Weight, map_weights
from lmlib.parallel.layout import storage_spec
from lmlib.parallel.mesh import make_mesh, slices_of
from lmlib.parallel.mesh_axes import NAMES, STAGE

REST = "fsdp"  # gets the devices that other axes leave
ROWS = "context"  # splits each row


def with_fewer_copies(mesh: Mesh) -> Mesh | None:
    """Splits stored weights over all devices of a slice, instead of copies along `data`.

    `None` without copies, or if each slice holds one.
    """
    sizes = dict(mesh.shape)
    slices = len(slices_of(mesh.devices.flat))
    copies = slices if sizes["data"] % slices == 0 else 1
    if sizes["data"] == copies:
        return None
    return resized(mesh, data=copies, fsdp=sizes["data"] * sizes["fsdp"] // copies)


def with_smaller_parts(mesh: Mesh) -> Mesh | None:
    """Doubles tensor parallelism, and halves the number of devices that share the batch.

    `None` if that number is odd.
    """
    sizes = dict(mesh.shape)
    halved = next((axis for axis in ("fsdp", "data", "expert") if sizes[axis] % 2 == 0), None)
    if halved is None:
        return None
    return resized(mesh, **{halved: sizes[halved] // 2, "tensor": 2 * sizes["tensor"]})


def with_a_second_fsdp(mesh: Mesh, size: int) -> Mesh | None:
    """Moves a factor `size` of devices from `fsdp` to `expert`; `None` if it does not divide."""
    sizes = dict(mesh.shape)
    if sizes["fsdp"] % size:
        return None
    return resized(mesh, fsdp=sizes["fsdp"] // size, expert=sizes["expert"] * size)


def check_axes(axes: Sequence[str]) -> None:
    """Raises `ValueError` if an axis does not exist in meshes, or is `REST`."""
    for axis in axes:
        if axis not in NAMES or axis == REST:
            others = ", ".join(name for name in NAMES if name != REST)
            raise ValueError(
                f"{axis!r} is no axis to try sizes of: {REST} has the devices that the others "
                f"leave, and these are {others}"
            )


def divisions(mesh: Mesh, axes: Sequence[str]) -> Iterator[Mesh]:
    """Yields every division of a mesh's devices among `axes` and `REST`.

    Other axes keep their sizes.
    """
    together = math.prod(mesh.shape[axis] for axis in (REST, *axes))
    divisors = [size for size in range(1, together + 1) if together % size == 0]
    for sizes in itertools.product(divisors, repeat=len(axes)):
        rest = together
        for size in sizes:
            rest = rest // size if rest % size == 0 else 0
        if rest:
            yield resized(mesh, **{REST: rest}, **dict(zip(axes, sizes, strict=True)))


def undivided(mesh: Mesh) -> Mesh:
    """Gives the devices of `context` and `stage` to `fsdp`; rows and layers are then whole.

    For programs with a few rows that are short, or of lengths that `context` does not divide.
    Returns the mesh itself if it splits neither rows nor layers.
    """
    if mesh.shape[ROWS] == mesh.shape[STAGE] == 1:
        return mesh
    axes = list(mesh.axis_names)
    # Weights keep their place on devices, except for layers of stages.
    together = [axes.index(STAGE), axes.index(REST), axes.index(ROWS)]
    devices = np.moveaxis(mesh.devices, together[-1], together[1] + 1)
    sizes = {**mesh.shape, REST: math.prod(mesh.devices.shape[axis] for axis in together)}
    sizes |= {ROWS: 1, STAGE: 1}
    return Mesh(devices.reshape([*sizes.values()]), mesh.axis_names, mesh.axis_types)


def undivided_model(model: M, mesh: Mesh) -> tuple[M, Mesh]:
    """Returns the model, stored on `undivided(mesh)`, and that mesh."""
    other = undivided(mesh)
    if other is mesh:
        return model, mesh

    def moved(weight: Weight, array: jax.Array) -> jax.Array:
        return jax.device_put(array, NamedSharding(other, storage_spec(weight, array.shape, other)))

    return map_weights(moved, model), other


def resized(mesh: Mesh, **changed: int) -> Mesh:
    """Returns the mesh with new sizes of some axes."""
    sizes = {**mesh.shape, **changed}
    own = {axis: sizes.pop(axis) for axis in NAMES}
    return make_mesh(**own, devices=list(mesh.devices.flat), others=sizes)
