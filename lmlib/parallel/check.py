"""Impossible layouts, found from shapes alone, before anything compiles."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
from jax.sharding import Mesh

from lmlib.parallel.axes import Axes, LayoutError, map_weights
from lmlib.parallel.layout import COMPUTE, STORED, MeshAxes, partition


def pieces(mesh_axes: MeshAxes, mesh: Mesh) -> int:
    """Into how many pieces `mesh` splits an axis that lies along `mesh_axes`."""
    names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
    return math.prod(mesh.shape[name] for name in names)


def check_model(make: Callable[[], eqx.Module], mesh: Mesh) -> None:
    """Sees that `mesh` can hold the model in both layouts.

    Raises:
      LayoutError: one line for each size that does not divide: the weights, the axis, both
        numbers, and what would work.
    """
    misfits: dict[str, dict[str, None]] = {}  # to paths, each once and in order

    def check(path: str, axes: Axes, weight: jax.ShapeDtypeStruct) -> None:
        for axis, size in zip(axes, weight.shape, strict=True):
            for rules in (COMPUTE, STORED):
                mesh_axes = partition((axis,), rules)[0]
                if size % pieces(mesh_axes, mesh):
                    misfit = _misfit(str(axis), size, mesh_axes, mesh)
                    misfits.setdefault(misfit, {})[path] = None

    map_weights(check, jax.eval_shape(make))
    if misfits:
        raise LayoutError(
            "\n".join(f"{', '.join(paths)}: {misfit}" for misfit, paths in misfits.items())
        )


def check_batch(
    batch_size: int, sequence_length: int, microbatches: int, sequence_parallel: bool, mesh: Mesh
) -> None:
    """Sees that `mesh` can split the batch.

    Raises:
      LayoutError: naming the axis and both numbers, and what would work.
    """
    if batch_size % microbatches:
        raise LayoutError(
            f"batch: {batch_size} sequences do not divide into {microbatches} microbatches; use "
            f"microbatches of {_choices(batch_size)}, or a batch that {microbatches} divides"
        )
    sizes = {"batch": batch_size // microbatches}
    if sequence_parallel:
        sizes["seq_parallel"] = sequence_length
    for axis, size in sizes.items():
        if size % pieces(COMPUTE[axis], mesh):
            what = f"each of {microbatches} microbatches: " if microbatches > 1 else ""
            raise LayoutError(what + _misfit(axis, size, COMPUTE[axis], mesh))


def _misfit(axis: str, size: int, mesh_axes: MeshAxes, mesh: Mesh) -> str:
    names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
    split = pieces(mesh_axes, mesh)
    along = " x ".join(f"{name}={mesh.shape[name]}" for name in names)
    return (
        f"axis {axis!r} of size {size} cannot be split over {along} (size {size} is no multiple of "
        f"{split}); use {' x '.join(names)} of {_choices(size)}, or {axis} a multiple of {split}"
    )


def _choices(size: int) -> str:
    """The divisors of `size`, in words."""
    small = [divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0]
    divisors = sorted({*small, *(size // divisor for divisor in small)})
    if len(divisors) > 12:
        return f"{', '.join(map(str, divisors[:12]))}, … (a divisor of {size})"
    *rest, last = map(str, divisors)
    return f"{', '.join(rest)} or {last}" if rest else last
