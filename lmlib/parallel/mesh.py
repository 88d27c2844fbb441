"""The device mesh. All axes of `MESH_AXES` exist; an unused one has size 1."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from lmlib.parallel.mesh_axes import NAMES, OVER_SLICES


class MeshError(ValueError):
    """A mesh that these devices cannot form."""


def make_mesh(
    data: int | None = None,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    stage: int = 1,
    devices: Sequence[jax.Device] | None = None,
    others: Mapping[str, int] | None = None,
) -> Mesh:
    """Makes a mesh of `data` × `stage` × `fsdp` × `expert` × `context` × `tensor` devices.

    - `data` replicates the weights.
    - `fsdp` shards them and gathers each layer for its use; with `data`: hybrid sharding (HSDP).
    - `tensor` splits heads, mlp and vocabulary.
    - `expert` works like `fsdp`, except that each device along it has its own experts.
    - `context` splits each row of tokens (`lmlib.models.attend.context_parallel`), and also works
      like `fsdp`.
    - `stage` splits the layers (`lmlib.models.pipeline`); elsewhere it works like `fsdp`.

    `data` defaults to the number of TPU slices, so that only gradients are sent over the network
    between them. If it does not span them all, `stage` and then `fsdp` span the rest.

    Args:
      data, fsdp, tensor, expert, context, stage: sizes; one may be -1, for all remaining devices.
      devices: defaults to all devices; a smaller mesh uses the first ones.
      others: sizes of further axes by their names, for weights whose `rules` name them; all devices
        along one see the same tokens.

    Raises:
      MeshError: if these devices cannot form the mesh.
    """
    available = jax.devices() if devices is None else list(devices)
    if data is None:
        data = len(slices_of(available)) if available[0].platform == "tpu" else 1
    sizes = dict(zip(NAMES, (data, stage, fsdp, expert, context, tensor), strict=True))
    if twice := sizes.keys() & (others or {}).keys():
        raise MeshError(
            f"others gives {', '.join(sorted(twice))}, which are arguments of their own"
        )
    sizes |= others or {}
    asked, count = f"mesh {_asked(sizes)}", len(available)
    if any(size < 1 and size != -1 for size in sizes.values()):
        raise MeshError(f"{asked}: each size must be at least 1, or -1 for every device left")
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1:
        raise MeshError(f"{asked}: only one size may be -1, not {' and '.join(free)}")
    if free and count % fixed:
        raise MeshError(
            f"{asked}: {count} devices do not divide by {fixed}; use sizes whose product divides "
            f"{count}"
        )
    sizes |= dict.fromkeys(free, count // fixed)
    needed = math.prod(sizes.values())
    if needed > count:
        raise MeshError(
            f"{asked} needs {needed} devices and there are {count}; lower a size, or set one to -1 "
            "to use every device left (to simulate devices on a CPU: "
            f"XLA_FLAGS='--xla_force_host_platform_device_count={needed} "
            "--xla_cpu_multi_thread_eigen=false')"
        )
    if needed < count and jax.process_count() > 1:
        raise MeshError(
            f"{asked} uses {needed} of {count} devices; with several processes every device must "
            "take part: set one size to -1"
        )
    explicit = (AxisType.Explicit,) * len(sizes)
    return Mesh(_placed(sizes, available[:needed]), tuple(sizes), explicit)


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh of `make_mesh` that holds the arrays of `tree`; `None` if there is none."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    meshes = (each.mesh for each in shardings if isinstance(each, NamedSharding))
    ours = (mesh for mesh in meshes if isinstance(mesh, Mesh) and {*NAMES} <= {*mesh.axis_names})
    return next(ours, None)


def on_mesh_of(tree: Any) -> contextlib.AbstractContextManager[Any]:
    """Sets the mesh that holds the arrays of `tree`, for code that computes with them.

    Does nothing if a mesh is already set, or the arrays are not on a mesh.
    """
    nothing = contextlib.nullcontext()
    if not jax.sharding.get_abstract_mesh().empty:
        return nothing
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer):  # only its type knows the mesh
            abstract = jax.typeof(leaf).sharding.mesh
            return nothing if abstract.empty else jax.sharding.use_abstract_mesh(abstract)
    mesh = mesh_of(tree)
    return nothing if mesh is None else jax.set_mesh(mesh)


def sizes_text(sizes: Mapping[str, int]) -> str:
    """The axes of a mesh with more than one device as text: "fsdp 4 × tensor 2"; may be empty."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def slices_of(devices: Iterable[jax.Device]) -> Counter[int]:
    """The number of `devices` in each slice of TPUs."""
    return Counter(getattr(device, "slice_index", 0) for device in devices)


def _placed(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Orders devices so that neighbours in the mesh are close in the network."""
    slices, over = slices_of(devices), dict.fromkeys(sizes, 1)
    left = count = len(slices)
    for axis in OVER_SLICES:
        over[axis] = math.gcd(sizes[axis], left)
        left //= over[axis]
    # A mesh axis may take a part of an axis of a TPU's torus.
    if count > 1 and len(set(slices.values())) == left == 1:
        within = [size // over[axis] for axis, size in sizes.items()]
        return mesh_utils.create_hybrid_device_mesh(
            within, [*over.values()], devices, allow_split_physical_axes=True
        )
    if count > 1 and devices[0].platform == "tpu":
        raise MeshError(
            f"mesh {_asked(sizes)} does not divide among {count} slices "
            f"({' and '.join(map(str, slices.values()))} TPUs): use every TPU, and let data be a "
            f"multiple of {count}"
        )
    shape = tuple(sizes.values())
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _asked(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in sizes.items())
