"""Finds impossible layouts from shapes, before anything compiles."""

import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from lmlib.compute import Compute, is_floating
from lmlib.parallel.axes import LayoutError, Weight, map_weights
from lmlib.parallel.layout import (
    COMPUTE,
    REPEATED,
    compute_spec,
    num_shards,
    repeats,
    splitting,
    storage_spec,
)
from lmlib.parallel.mesh_axes import STAGE, MeshAxes


def check_model(model: Any, mesh: Mesh | AbstractMesh) -> None:
    """Checks that `mesh` can hold the model, which may be abstract, in both layouts.

    Raises:
      LayoutError: one line for each size that does not divide, with the weights, the axis, both
        numbers, and a remedy; or if the stages would not have their own layers.
    """
    layers = [0]
    misfits: dict[str, dict[str, None]] = {}  # to paths, each once and in order

    def check(weight: Weight, array: Any) -> None:
        _check_declaration(weight, array)
        layers.append(array.shape[0] if weight.stacked else 0)
        rules, blocks = {**COMPUTE, **weight.declaration.rules}, weight.declaration.blocks
        path = weight.path.rpartition(".")[0] if blocks else weight.path  # of the matrix
        for layout in (compute_spec, storage_spec):
            places = layout(weight, array.shape, mesh)
            for axis, size, place in zip(weight.axes, array.shape, places, strict=True):
                if size % num_shards(place, mesh) and repeats(axis, size, rules, mesh) == 1:
                    text = misfit(axis, size, place, mesh, blocks.get(axis, 1))
                    misfits.setdefault(text, {})[path] = None

    map_weights(check, model)
    if misfits:
        raise LayoutError("\n".join(f"{', '.join(at)}: {text}" for text, at in misfits.items()))
    if max(layers) < mesh.shape[STAGE] > 1:
        raise LayoutError(
            f"stage={mesh.shape[STAGE]} needs as many layers that follow each other in one "
            f"pattern, and the model has {max(layers)}: no stage would have layers of its own; "
            "use a smaller stage, and a larger fsdp"
        )


def _check_declaration(weight: Weight, array: Any) -> None:
    """Raises LayoutError for an array that is not floating, or for an invalid declaration."""
    path, declared = weight.path, weight.declaration
    dtype, rate, axes = declared.dtype, declared.learning_rate, " ".join(weight.own_axes)
    if not (is_floating(array.dtype) or array.dtype.name.endswith("int8")) and declared.gradient:
        raise LayoutError(f"{path} must be float32, got {array.dtype}")
    if dtype is not None and not is_floating(dtype):
        raise LayoutError(f"{path}: its dtype must be a floating type, got {dtype!r}")
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise LayoutError(f"{path}: its learning_rate must be a factor >= 0, got {rate!r}")
    if wrong := [axis for axis in declared.summed if axis not in weight.axes]:
        raise LayoutError(f"{path}: its products sum over {wrong[0]!r}, but its axes are {axes}")


def check_batch(
    batch_size: int,
    sequence_length: int,
    microbatches: int,
    compute: Compute,
    mesh: Mesh | AbstractMesh,
) -> None:
    """Raises LayoutError if `mesh` cannot split the batch."""
    if batch_size % microbatches:
        raise LayoutError(
            f"batch: {batch_size} sequences do not divide into {microbatches} microbatches; use "
            f"microbatches of {_choices(batch_size)}, or a batch that {microbatches} divides"
        )
    sizes = {"batch": batch_size // microbatches}
    if compute.sequence_parallel:
        sizes["seq_parallel"] = sequence_length
    devices = num_shards(COMPUTE["seq"], mesh)
    if devices > 1 and sequence_length % (2 * devices):
        raise LayoutError(
            f"rows of {sequence_length} tokens do not divide into an early and a late piece for "
            f"each of {devices} devices along {COMPUTE['seq']}; use a multiple of {2 * devices}"
        )
    rows = compute.pipeline_rows * num_shards(COMPUTE["batch"], mesh)
    if mesh.shape[STAGE] > 1 and sizes["batch"] % rows:
        raise LayoutError(
            f"{sizes['batch']} sequences do not divide into {compute.pipeline_rows} rows of each "
            f"of {rows // compute.pipeline_rows} devices for each microbatch of the pipeline; use "
            f"a multiple of {rows}, or another pipeline_rows"
        )
    for axis, size in sizes.items():
        if size % num_shards(COMPUTE[axis], mesh):
            what = f"each of {microbatches} microbatches: " if microbatches > 1 else ""
            raise LayoutError(what + misfit(axis, size, COMPUTE[axis], mesh))


def misfit(
    axis: str, size: int, mesh_axes: MeshAxes, mesh: Mesh | AbstractMesh, block: int = 1
) -> str:
    """Says that `mesh_axes` cannot split `size` blocks of elements along `axis`."""
    names, split = splitting(mesh_axes, mesh), num_shards(mesh_axes, mesh)
    along = " x ".join(f"{name}={mesh.shape[name]}" for name in names)
    counted = f"size {size}" if block == 1 else f"the number of its blocks of {block}, {size},"
    others = "" if block == 1 else ", or another frozen_dtype"
    others = f" or a divisor of {split}" if axis in REPEATED else others
    return (
        f"axis {axis!r} of size {size * block} cannot be split over {along} ({counted} is no "
        f"multiple of {split}); use {' x '.join(names)} of {_choices(size)}, or {axis} a multiple "
        f"of {split * block}{others}"
    )


def _choices(size: int) -> str:
    """The divisors of `size` as text."""
    *rest, last = (str(each) for each in range(1, size + 1) if size % each == 0)
    if len(rest) > 11:
        return f"{', '.join(rest[:12])}, … (a divisor of {size})"
    return f"{', '.join(rest)} or {last}" if rest else last
