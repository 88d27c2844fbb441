"""Functions for the part of an array on one device, for kernels and explicit collectives.

Inside `shard_map`, these functions communicate along mesh axes, such as those that
`lmlib.parallel.layout.mesh_axes_for` returns. Without a mesh, nothing is sent.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from lmlib.parallel.mesh_axes import MeshAxes, names_of, place_of

# The axis that `lmlib.parallel.stages.each_stage` maps; not an axis of the mesh.
IN_STAGES = "stages"


def shard_map(
    function: Callable[..., Any], inputs: Sequence[Any], outputs: Any, tracked: bool = True
) -> Callable[..., Any]:
    """Runs `function` on the parts of its arguments that each device holds (`jax.shard_map`).

    Arguments with another layout than `inputs` are moved first. If `tracked`, JAX tracks the mesh
    axes along which values differ: derivatives through collectives need this; kernels and loop
    carries do not support it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    if in_a_stage():
        from lmlib.parallel.stages import in_each_stage

        return in_each_stage(function, inputs, outputs, tracked)
    return shard_map_outside_stages(function, inputs, outputs, tracked)


def shard_map_outside_stages(
    function: Callable[..., Any], inputs: Sequence[Any], outputs: Any, tracked: bool
) -> Callable[..., Any]:
    """`shard_map`, for a mesh that is set and outside of pipeline stages."""
    mesh = jax.sharding.get_abstract_mesh()
    # JAX cannot lower partial sums on one device, so the layout is set afterwards.
    given = jax.tree.map(lambda spec: PartitionSpec(*spec.partitions), outputs)
    out_specs = given if mesh.size == 1 else outputs
    mapped = jax.shard_map(function, in_specs=tuple(inputs), out_specs=out_specs, check_vma=tracked)

    def call(*arguments: Any) -> Any:
        results = mapped(*map(jax.sharding.reshard, arguments, inputs))
        if mesh.size > 1 or given == outputs:
            return results
        return jax.sharding.reshard(results, outputs)

    return call


def all_gather(x: jax.Array, mesh_axes: MeshAxes, axis: int) -> jax.Array:
    """The parts of all devices along `mesh_axes`, concatenated along `axis`."""
    if _alone(mesh_axes):
        return x
    for names in reversed(in_steps(mesh_axes)):
        x = jax.lax.all_gather(x, names, axis=axis, tiled=True)
    return x


def psum(x: jax.Array, mesh_axes: MeshAxes) -> jax.Array:
    """The sum over the devices along `mesh_axes`, on each of them."""
    return x if _nowhere(mesh_axes) else jax.lax.psum(x, mesh_axes)


def psum_scatter(x: jax.Array, mesh_axes: MeshAxes, axis: int) -> jax.Array:
    """The sum over the devices along `mesh_axes`; each device keeps its part along `axis`."""
    if _alone(mesh_axes):
        return x
    for names in in_steps(mesh_axes):
        x = jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)
    return x


def all_to_all(x: jax.Array, mesh_axes: MeshAxes, split: int, joined: int) -> jax.Array:
    """Sends each device along `mesh_axes` its piece of `x` along `split`; joins along `joined`."""
    if _alone(mesh_axes):
        return x
    return jax.lax.all_to_all(x, mesh_axes, split, joined, tiled=True)


def pmax(x: jax.Array, mesh_axes: MeshAxes) -> jax.Array:
    """The maximum over the devices along `mesh_axes`, on each of them."""
    return x if _nowhere(mesh_axes) else jax.lax.pmax(x, mesh_axes)


def devices_along(mesh_axes: MeshAxes) -> int:
    """The number of devices along `mesh_axes`."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in names_of(mesh_axes))


def axis_index(mesh_axes: MeshAxes) -> jax.Array | int:
    """The index of this device along `mesh_axes`, from 0."""
    return 0 if _nowhere(mesh_axes) else jax.lax.axis_index(mesh_axes)


def platform() -> str:
    """The platform of the devices that traced code will run on: "cpu", "tpu", "cuda" or "rocm"."""
    mesh = jax.sharding.get_abstract_mesh()
    device = (None if mesh.empty else mesh.abstract_device) or jax.devices()[0]
    if device.platform == "gpu":
        return "rocm" if device.device_kind.startswith("AMD") else "cuda"
    return device.platform


def in_steps(mesh_axes: MeshAxes) -> list[MeshAxes]:
    """Splits `mesh_axes` into steps of a scatter or a gather, one per axis of size 2 or more."""
    # On TPUs, all these axes together may span three dimensions of the torus, for which libtpu
    # sends twice the bytes. On GPUs NCCL chooses its own route.
    if platform() not in ("cpu", "tpu"):
        return [mesh_axes]
    steps: list[list[str]] = []
    for name in names_of(mesh_axes):
        if steps and 1 in (devices_along(name), devices_along(tuple(steps[-1]))):
            steps[-1].append(name)
        else:
            steps.append([name])
    return [place_of(step) for step in steps]


def _nowhere(mesh_axes: MeshAxes) -> bool:
    return jax.sharding.get_abstract_mesh().empty or not names_of(mesh_axes)


def _alone(mesh_axes: MeshAxes) -> bool:
    return devices_along(mesh_axes) == 1


def in_a_stage() -> bool:
    """True while the computation of one pipeline stage is traced."""
    return is_mapped(IN_STAGES)


def is_mapped(axis: str) -> bool:
    """True if collectives may name `axis` in the current trace."""
    try:
        jax.lax.axis_size(axis)
    except NameError:  # raised by JAX for an axis that is not mapped
        return False
    return True
