"""Folders of weights to models on the mesh.

Each device's process reads its own contiguous share of a tensor, each byte once over all processes;
reshaping, transposing, splitting and the way to where the weight lies happen on the devices.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from lmlib.hf.families import described
from lmlib.hf.hub import local_folder_of
from lmlib.hf.names import Names, Share, check_complete, placed
from lmlib.hf.tensor_files import FolderError, Stored, stored_tensors
from lmlib.models.decoder import Decoder
from lmlib.parallel.axes import map_weights
from lmlib.parallel.check import check_model
from lmlib.parallel.layout import stored
from lmlib.parallel.mesh import make_mesh

Progress = Callable[[int, int], None]


def load(folder: str | Path, mesh: Mesh | None = None, progress: Progress | None = None) -> Decoder:
    """The model of a folder that Hugging Face's `save_pretrained` wrote; float32, laid out as it
    is stored.

    Args:
      folder: with config.json and safetensors; or its name on the Hub.
      mesh: `None`: one device, for calls without a mesh.
      progress: called with the bytes read and all bytes, after each tensor.

    Raises:
      FolderError: if the folder cannot be used, or describes another model than its tensors are.
      LayoutError: if the mesh cannot hold the model.
    """
    folder = local_folder_of(folder)
    found = described(folder)
    model = jax.eval_shape(found.build, jax.random.key(0))
    if mesh is not None:
        return load_weights(folder, model, found.family.names, mesh, progress)
    one = make_mesh(devices=jax.local_devices()[:1])
    weights = load_weights(folder, model, found.family.names, one, progress)
    return jax.device_put(weights, SingleDeviceSharding(one.devices.flat[0]))


def load_weights(
    folder: Path, model: Decoder, names: Names, mesh: Mesh, progress: Progress | None = None
) -> Decoder:
    """As `load`, for a model whose shapes and dtypes are known."""
    there = stored_tensors(folder)
    if not any(name.startswith(names.base) for name in there):
        there = {_with_base(name, names): tensor for name, tensor in there.items()}
    wanted = placed(model, names)
    extra = (*names.without_effect, *(_head_of(names) if model.unembedding is None else ()))
    try:
        check_complete(wanted, {name: each.shape for name, each in there.items()}, extra)
    except ValueError as error:
        raise FolderError(f"{folder}: {error}") from None
    weights: dict[str, jax.Array] = {}
    check_model(model, mesh)
    layouts = _layouts(model, mesh)
    total = sum(there[tensor.name].end - there[tensor.name].offset for tensor in wanted)
    read = 0
    for tensor in wanted:
        source = there[tensor.name]
        flat = _read(source, mesh)
        for path, repetition, share in tensor.pieces:
            target = layouts[path]
            if repetition is None:
                weights[path] = _cutter(tensor.shape, share, target.sharding, target.dtype)(flat)
            else:
                if path not in weights:
                    weights[path] = _zeros(target)
                put = _stacker(tensor.shape, share, target.sharding, target.dtype)
                weights[path] = put(weights[path], flat, np.int32(repetition))
        # Else the host would read on, and hold what the devices have not taken yet.
        jax.block_until_ready([weights[path] for path, _, _ in tensor.pieces])
        read += source.end - source.offset
        if progress is not None:
            progress(read, total)
    return map_weights(lambda weight, _: weights[weight.path], model)


def _with_base(name: str, names: Names) -> str:
    return name if name in _head_of(names) else names.base + name


def _head_of(names: Names) -> tuple[str, ...]:
    return tuple(each.name for each in names.outside if "unembedding" in each.holds)


def _layouts(model: Decoder, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and layout of each weight, by path."""
    found: dict[str, jax.ShapeDtypeStruct] = {}

    def visit(weight: Any, array: Any) -> None:
        layout = NamedSharding(mesh, stored(weight, array.shape, mesh))
        found[weight.path] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout)

    map_weights(visit, model)
    return found


def shares(size: int, mesh: Mesh) -> tuple[int, NamedSharding]:
    """The length that `size` values have with padding, and the layout that gives each device a
    contiguous share of them."""
    count = mesh.devices.size
    return -(-size // count) * count, NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _read(source: Stored, mesh: Mesh) -> jax.Array:
    """The tensor's values one after another, a share on each device, padded with zeros."""
    padded, layout = shares(source.size, mesh)

    def share(index: Any) -> np.ndarray:
        start, end, _ = index[0].indices(padded)
        return source.read(min(start, source.size), min(end, source.size), room=end - start)

    return jax.make_array_from_callback((padded,), layout, share)


def _cut(
    flat: jax.Array, shape: tuple[int, ...], share: Share, layout: NamedSharding, dtype: DTypeLike
) -> jax.Array:
    """The weight in a tensor of `shape`, of the tensor's padded values. Each device has the whole
    tensor for a moment."""
    whole = jax.sharding.reshard(flat, NamedSharding(layout.mesh, PartitionSpec()))
    weight = share.cut(whole[: math.prod(shape)].reshape(shape)).astype(dtype)
    return jax.sharding.reshard(weight, layout)


@functools.lru_cache(maxsize=256)
def _cutter(
    shape: tuple[int, ...], share: Share, layout: NamedSharding, dtype: DTypeLike
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda flat: _cut(flat, shape, share, layout, dtype))


@functools.lru_cache(maxsize=256)
def _stacker(
    shape: tuple[int, ...], share: Share, layout: NamedSharding, dtype: DTypeLike
) -> Callable[[jax.Array, jax.Array, np.int32], jax.Array]:
    """Puts a layer's weight into its stack, whose buffer it takes."""
    own = NamedSharding(layout.mesh, PartitionSpec(*layout.spec[1:]))

    def put(stack: jax.Array, flat: jax.Array, layer: jax.Array) -> jax.Array:
        weight = _cut(flat, shape, share, own, dtype)
        return jax.lax.dynamic_update_index_in_dim(stack, weight, layer, 0)

    return jax.jit(put, out_shardings=layout, donate_argnums=0)


def _zeros(target: jax.ShapeDtypeStruct) -> jax.Array:
    make = functools.partial(jnp.zeros, target.shape, target.dtype)
    return jax.jit(make, out_shardings=target.sharding)()
