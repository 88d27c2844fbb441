"""Folders of weights to models on the mesh.

Each device's process reads its own contiguous share of a tensor, each byte once over all processes;
it is reshaped, transposed, split and laid out on the devices. A weight that is kept in another form
is converted before the next tensor is read.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from lmlib.hf.families import FAMILIES, described
from lmlib.hf.hub import local_folder_of
from lmlib.hf.names import Piece, Share, check_complete, least_count, placed
from lmlib.hf.tensor_files import DTYPES, Stored, stored_tensors
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face.family import Family, Names
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.check import check_model
from lmlib.parallel.layout import stored
from lmlib.parallel.mesh import make_mesh

Progress = Callable[[int, int], None]
Kept = Callable[[Weight, jax.Array], Any]


def load(
    folder: str | Path,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    families: Sequence[Family] = FAMILIES,
) -> Decoder:
    """The model of a folder that Hugging Face's `save_pretrained` wrote; float32, laid out as it
    is stored.

    Args:
      folder: with config.json and safetensors; or its name on the Hub.
      mesh: `None`: one device, for calls without a mesh.
      progress: called with the bytes read and all bytes, after each tensor.
      families: those that are known, your own among them.

    Raises:
      FolderError: if the folder cannot be used, or describes another model than its tensors are.
      LayoutError: if the mesh cannot hold the model.
    """
    folder = local_folder_of(folder)
    found = described(folder, families)
    names = found.family.names
    if mesh is not None:
        return load_weights(folder, found.shapes, names, mesh, progress)
    one = make_mesh(devices=jax.local_devices()[:1])
    weights = load_weights(folder, found.shapes, names, one, progress)
    return jax.device_put(weights, SingleDeviceSharding(one.devices.flat[0]))


def load_weights(
    folder: Path,
    model: Decoder,
    names: Names,
    mesh: Mesh,
    progress: Progress | None = None,
    kept: Kept = lambda weight, array: array,
) -> Any:
    """As `load`, for a model whose shapes and dtypes are known.

    Args:
      kept: converts the array of each layer, to another dtype for example. It must not change the
        layouts of arrays.
    """
    there = stored_tensors(folder)
    layers, alike = least_count(model, names)
    if alike > len(there):  # before each of them is looked for
        raise FolderError(
            f"{folder}: config.json says {layers:,} layers, of {alike:,} tensors of one kind, but "
            f"there are {len(there):,} of all kinds"
        )
    if not any(name.startswith(names.base) for name in there):
        there = {_with_base(name, names): tensor for name, tensor in there.items()}
    wanted = placed(model, names)
    table, head = (names.tensor_of(path) for path in ("embedding", "unembedding"))
    tied = model.unembedding is None
    shapes = {name: each.shape for name, each in there.items() if not (tied and name == head)}
    try:
        check_complete(wanted, shapes, names.without_effect)
    except ValueError as error:
        raise FolderError(f"{folder}: {error}") from None
    check_model(model, mesh)
    if tied and head in there:
        _check_tied(folder, there, head, table, mesh)
    places = _places(model, mesh)
    weights: dict[str, Any] = {}
    parts: dict[tuple[str, int | None], _Parts] = collections.defaultdict(dict)
    total = sum(there[tensor.name].end - there[tensor.name].offset for tensor in wanted)
    read = 0
    for tensor in wanted:
        source = there[tensor.name]
        flat = _read(tensor.name, source, mesh)
        done: list[Any] = []
        for piece in tensor.pieces:
            path, repetition, share, fixed = piece
            place = places[path]
            layout = place.layout_of(piece)
            array = _cut(flat, tensor.shape, share, layout, place.dtype)
            if fixed:
                own = parts[path, repetition]
                own[tuple(index for _, index in fixed)] = array
                done += own.values()
                if len(own) < math.prod(place.shape[axis] for axis, _ in fixed):
                    continue
                together = parts.pop((path, repetition))
                axes = tuple(axis for axis, _ in fixed)
                ordered = [together[index] for index in sorted(together)]
                array = _together(ordered, axes, place.shape, place.layout)
            array = kept(place.weight, array)
            if repetition is None:
                weights[path] = array
            else:
                if path not in weights:
                    weights[path] = jax.tree.map(functools.partial(_stack, place.layers), array)
                put = functools.partial(_put, layer=np.int32(repetition))
                weights[path] = jax.tree.map(put, weights[path], array)
            done.append(weights[path])
        # Else the host would read on, and hold tensors that the devices have not taken yet.
        jax.block_until_ready(done)
        read += source.end - source.offset
        if progress is not None:
            progress(read, total)
    return map_weights(lambda weight, _: weights[weight.path], model)


def _with_base(name: str, names: Names) -> str:
    return name if name == names.tensor_of("unembedding") else names.base + name


def _check_tied(
    folder: Path, there: Mapping[str, Stored], head: str, table: str, mesh: Mesh
) -> None:
    """Raises FolderError if the head is another matrix than the table that it should be tied to:
    `transformers` would use it."""
    one, other = there[head], there[table]
    if one.shape != other.shape or not _same(_read(head, one, mesh), _read(table, other, mesh)):
        raise FolderError(
            f"{folder}: {head} differs from {table}, but config.json has tie_word_embeddings = "
            "True, or does not say, which means True: set it to False, or remove the head"
        )


@jax.jit
def _same(one: jax.Array, other: jax.Array) -> jax.Array:
    return (one == other).all()


_Parts = dict[tuple[int, ...], jax.Array]  # of a weight, by indices along the axes that split it


class _Place(NamedTuple):
    """The destination of a tensor's values: the weight of one layer, its shape and layout, and the
    number of layers in its stack (1: it has none)."""

    weight: Weight
    dtype: np.dtype
    shape: tuple[int, ...]
    layout: NamedSharding
    layers: int

    def layout_of(self, piece: Piece) -> NamedSharding:
        """The layout of a piece, which lacks the axes that its tensor's name enumerates."""
        if not piece.fixed:
            return self.layout
        own = dataclasses.replace(self.weight, axes=piece.share.axes)
        return NamedSharding(self.layout.mesh, stored(own, piece.share.sizes, self.layout.mesh))


def _places(model: Decoder, mesh: Mesh) -> dict[str, _Place]:
    """By the paths of the weights."""
    found: dict[str, _Place] = {}

    def visit(weight: Weight, array: Any) -> None:
        stacked = weight.stacked > 0
        own = dataclasses.replace(weight, axes=weight.own_axes)
        shape = array.shape[stacked:]
        layout = NamedSharding(mesh, stored(own, shape, mesh))
        layers = array.shape[0] if stacked else 1
        found[weight.path] = _Place(own, array.dtype, shape, layout, layers)

    map_weights(visit, model)
    return found


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _together(
    parts: list[jax.Array], axes: tuple[int, ...], shape: tuple[int, ...], layout: NamedSharding
) -> jax.Array:
    """The weight of one layer, of its parts in several tensors: one for each index of `axes`."""
    apart = jnp.stack(parts).reshape(*(shape[axis] for axis in axes), *parts[0].shape)
    return jax.sharding.reshard(jnp.moveaxis(apart, range(len(axes)), axes), layout)


def shares(size: int, mesh: Mesh) -> tuple[int, NamedSharding]:
    """The length that `size` values have with padding, and the layout that gives each device a
    contiguous share of them."""
    count = mesh.devices.size
    return -(-size // count) * count, NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _read(name: str, source: Stored, mesh: Mesh) -> jax.Array:
    """The tensor's values one after another, a share on each device, padded with zeros.

    Raises:
      FolderError: if one is not finite.
    """
    padded, layout = shares(source.size, mesh)

    def share(index: Any) -> np.ndarray:
        start, end, _ = index[0].indices(padded)
        return source.read(min(start, source.size), min(end, source.size), room=end - start)

    values = jax.make_array_from_callback((padded,), layout, share)
    check_finite(name, source, values)
    return values


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _cut(
    flat: jax.Array, shape: tuple[int, ...], share: Share, layout: NamedSharding, dtype: DTypeLike
) -> jax.Array:
    """The weight in a tensor of `shape`, of the tensor's padded values. Each device has the whole
    tensor for a moment."""
    whole = jax.sharding.reshard(flat, NamedSharding(layout.mesh, PartitionSpec()))
    weight = share.cut(whole[: math.prod(shape)].reshape(shape)).astype(dtype)
    return jax.sharding.reshard(weight, layout)


def _stack(layers: int, one: jax.Array) -> jax.Array:
    """Zeros for `layers` arrays like this one."""
    assert isinstance(one.sharding, NamedSharding)
    layout = NamedSharding(one.sharding.mesh, PartitionSpec(None, *one.sharding.spec))
    return jnp.zeros((layers, *one.shape), one.dtype, device=layout)


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, array: jax.Array, layer: jax.Array) -> jax.Array:
    """`stack`, whose buffer it takes, with a layer's array at its place."""
    return jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0)


_AT_ONCE = 1 << 22  # values


def check_finite(name: str, source: Stored, values: ArrayLike) -> None:
    """Checks a tensor that was read, on the devices that hold it. The file is read again only to
    find the fault. All processes find the same.

    Args:
      name: in the folder.
      source: where it was read from.
      values: all of it, on the host or on devices.

    Raises:
      FolderError: naming the tensor, how many values are not finite, and the first of them; or its
        dtype, if that is not a float.
    """
    if source.dtype not in DTYPES.values():
        raise FolderError(
            f"{source.file}: {name} has values of {source.dtype}, but weights are floats: "
            f"{', '.join(DTYPES)}"
        )
    if np.isfinite(values).all() if isinstance(values, np.ndarray) else _all_finite(values):
        return
    count, first, value = 0, 0, np.float32(0)
    for start in range(0, source.size, _AT_ONCE):
        with np.errstate(over="ignore"):  # values beyond float32
            read = source.read(start, min(start + _AT_ONCE, source.size)).astype(np.float32)
        (places,) = np.nonzero(~np.isfinite(read))
        if len(places) and not count:
            first, value = start + int(places[0]), read[places[0]]
        count += len(places)
    index = tuple(int(i) for i in np.unravel_index(first, source.shape))
    raise FolderError(
        f"{source.file}: {count:,} of {source.size:,} values of {name} are not finite in float32, "
        f"the first is {value} at {index}: whatever is computed with them is no number"
    )


@jax.jit
def _all_finite(values: jax.Array) -> jax.Array:
    return jnp.isfinite(values).all()
