"""The device mesh. Its three axes are always there; an axis that is not used has size 1."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor")


class MeshError(ValueError):
    """A mesh that these devices cannot form."""


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of `data` × `fsdp` × `tensor` devices with `AxisType.Explicit` axes.

    `data` replicates the weights, `fsdp` shards them and gathers each layer for its use, `tensor`
    splits heads, mlp and vocabulary. `data` × `fsdp` together is hybrid sharding (HSDP). One of the
    sizes may be -1: every device that the other two leave. `devices` defaults to all of them; a
    mesh smaller than that uses the first ones.

    Raises:
      MeshError: if a size is neither positive nor -1, more than one is -1, the devices do not
        divide, or there are too few.
    """
    available = jax.devices() if devices is None else list(devices)
    sizes = dict(zip(AXES, (data, fsdp, tensor), strict=True))
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise MeshError(f"mesh {asked}: each size must be at least 1, or -1 for every device left")
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise MeshError(f"mesh {asked}: only one size may be -1, not {' and '.join(free)}")
    if free:
        if len(available) % fixed:
            raise MeshError(
                f"mesh {asked}: {len(available)} devices do not divide by {fixed}; "
                f"use sizes whose product divides {len(available)}"
            )
        sizes[free[0]] = len(available) // fixed
    needed = math.prod(sizes.values())
    if needed > len(available):
        raise MeshError(
            f"mesh {asked} needs {needed} devices and there are {len(available)}; lower a size, or "
            "set one to -1 to use every device left (to simulate devices on a CPU: "
            f"XLA_FLAGS='--xla_force_host_platform_device_count={needed} "
            "--xla_cpu_multi_thread_eigen=false')"
        )
    if needed < len(available) and jax.process_count() > 1:
        raise MeshError(
            f"mesh {asked} uses {needed} of {len(available)} devices; with several processes every "
            "device must take part: set one size to -1"
        )
    return Mesh(_placed(tuple(sizes.values()), available[:needed]), AXES, (AxisType.Explicit,) * 3)


def _placed(shape: tuple[int, ...], devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices in an order that keeps neighbours in the mesh near each other in the network."""
    slices = {getattr(device, "slice_index", 0) for device in devices}
    data, fsdp, tensor = shape
    if len(slices) > 1 and data % len(slices) == 0:
        # Only gradients cross the slow network between slices: `data` spans it.
        within = (data // len(slices), fsdp, tensor)
        return mesh_utils.create_hybrid_device_mesh(
            within, (len(slices), 1, 1), devices, allow_split_physical_axes=True
        )
    # A mesh axis may take a part of an axis of a TPU's torus.
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
