"""Loads folders of weights into models on the mesh.

Each process reads contiguous slices of a tensor for its own devices, so each byte is read once over
all processes. The tensor is then reshaped, transposed, split and laid out on the devices. If a
weight is stored in another form, it is converted before the next tensor is read.
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
from lmlib.hf.four_bit import Packed, Values, with_packed
from lmlib.hf.hub import local_folder_of
from lmlib.hf.names import (
    Piece,
    Placed,
    Share,
    check_complete,
    heads_in,
    least_count,
    placed,
    repeated,
)
from lmlib.hf.tensor_files import DTYPES, Stored, stored_tensors
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face.family import Family, Names
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.matrices.four_bit import FourBit
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.check import check_model
from lmlib.parallel.layout import storage_spec
from lmlib.parallel.matrix import dense
from lmlib.parallel.mesh import make_mesh

Progress = Callable[[int, int], None]
Kept = Callable[[Weight, jax.Array], Any]


def load(
    folder: str | Path,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    families: Sequence[Family] = FAMILIES,
) -> Decoder:
    """Loads a model from a folder written by Hugging Face's `save_pretrained`, in float32.

    Raises FolderError if the folder cannot be used, or its tensors do not fit the model that it
    describes, and LayoutError if the mesh cannot hold the model.

    If the folder has heads of multi-token prediction, the model is a `MultiTokenDecoder`, whose
    heads are trained by `lmlib.losses.multi_token.MultiToken` and saved again.

    Args:
      folder: contains config.json and safetensors; or its name on the Hub.
      mesh: where to place the model, in its storage layout; `None`: one device, for calls without a
        mesh.
      progress: called with the bytes read so far and the total, after each tensor.
      families: the known families; may include your own.
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
    kept: Kept | None = None,
) -> Any:
    """Like `load`, for a model with known shapes and dtypes.

    Args:
      kept: converts each layer's array, for example to another dtype. It must not change layouts.
        It also gets matrices in 4 bits, if the folder has them.
    """
    there = with_packed(
        {names.usual(name): tensor for name, tensor in stored_tensors(folder).items()}
    )
    layers, alike = least_count(model, names)
    if alike > len(there):  # checked before each of them is looked for
        raise FolderError(
            f"{folder}: the {layers:,} layers in config.json need {alike:,} tensors of one kind, "
            f"but the folder has {len(there):,} in all"
        )
    if not any(name.startswith(names.base) for name in there):
        there = {_with_base(name, names): tensor for name, tensor in there.items()}
    wanted = placed(model, names)
    table, head = (names.tensor_of(path) for path in ("embedding", "unembedding"))
    copies = repeated(model, names)
    # A model without heads leaves the folder's out, as transformers does; so does a reward model.
    left_out = () if hasattr(model, "predictors") else tuple(heads_in(there, names, layers))
    if hasattr(model, "score"):
        left_out += (head,)
    elif model.unembedding is None:
        copies[head] = table
    shapes = {
        name: each.shape
        for name, each in there.items()
        if name not in copies and not name.startswith(left_out)
    }
    try:
        check_complete(wanted, shapes, names.without_effect)
    except ValueError as error:
        raise FolderError(f"{folder}: {error}") from None
    check_model(model, mesh)
    for name in copies.keys() & there.keys():
        _check_same(folder, there, name, copies[name], mesh)
    places = _places(model, mesh)
    weights: dict[str, Any] = {}
    parts: dict[tuple[str, int | None], _Parts] = collections.defaultdict(dict)
    total = sum(there[tensor.name].bytes for tensor in wanted)
    read = 0
    for tensor in wanted:
        source = there[tensor.name]
        packed = _packed(source, mesh) if isinstance(source, Packed) else None
        flat = _read(tensor.name, source, mesh) if packed is None else None
        done: list[Any] = []
        for piece in tensor.pieces:
            path, repetition, share, fixed = piece
            place = places[path]
            layout = place.layout_of(piece)
            array: Any = None
            if packed is not None and not fixed:
                array = _matrix(packed, tensor, share, place)
            if array is None:
                flat = packed.expanded() if flat is None and packed is not None else flat
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
            array = (kept or whole)(place.weight, array)
            if repetition is None:
                weights[path] = array
            else:
                if path not in weights:
                    weights[path] = jax.tree.map(functools.partial(_stack, place.layers), array)
                put = functools.partial(_put, layer=np.int32(repetition))
                weights[path] = jax.tree.map(put, weights[path], array)
            done.append(weights[path])
        # Otherwise the host would read ahead and hold tensors that are not on the devices yet.
        jax.block_until_ready(done)
        read += source.bytes
        if progress is not None:
            progress(read, total)
    return map_weights(lambda weight, _: weights[weight.path], model)


def _with_base(name: str, names: Names) -> str:
    return name if name == names.tensor_of("unembedding") else names.base + name


def _check_same(
    folder: Path, there: Mapping[str, Stored | Packed], copy: str, table: str, mesh: Mesh
) -> None:
    """Raises FolderError if a copy differs: of a tied table, or of what multi-token heads share.

    `transformers` would use a head that differs from a tied table.
    """
    one, other = there[copy], there[table]
    if isinstance(one, Packed) or isinstance(other, Packed):
        raise FolderError(f"{folder}: {copy} or {table} is in 4 bits, where tables are not read so")
    if one.shape != other.shape or not _same(_read(copy, one, mesh), _read(table, other, mesh)):
        raise FolderError(
            f"{folder}: {copy} differs from {table}, but "
            + (
                "multi-token heads share it: remove the copy, or make it the same"
                if copy.count(".") > 1
                else "config.json has tie_word_embeddings = True, or does not say, which means "
                "True: set it to False, or remove the head"
            )
        )


@jax.jit
def _same(one: jax.Array, other: jax.Array) -> jax.Array:
    return (one == other).all()


_Parts = dict[tuple[int, ...], jax.Array]  # of a weight, by indices along the axes that split it


class _Place(NamedTuple):
    """The destination of a tensor's values: one layer's weight, with its shape and layout.

    `layers` is the number of layers in its stack, or 1 without a stack.
    """

    weight: Weight
    dtype: np.dtype
    shape: tuple[int, ...]
    layout: NamedSharding
    layers: int

    def layout_of(self, piece: Piece) -> NamedSharding:
        """Returns the layout of a piece, which lacks the axes in its tensor's name."""
        if not piece.fixed:
            return self.layout
        own = dataclasses.replace(self.weight, axes=piece.share.axes)
        return NamedSharding(
            self.layout.mesh, storage_spec(own, piece.share.sizes, self.layout.mesh)
        )


def _places(model: Decoder, mesh: Mesh) -> dict[str, _Place]:
    """Returns the destination of each weight, by path."""
    found: dict[str, _Place] = {}

    def visit(weight: Weight, array: Any) -> None:
        stacked = weight.stacked > 0
        own = dataclasses.replace(weight, axes=weight.own_axes)
        shape = array.shape[stacked:]
        layout = NamedSharding(mesh, storage_spec(own, shape, mesh))
        layers = array.shape[0] if stacked else 1
        found[weight.path] = _Place(own, array.dtype, shape, layout, layers)

    map_weights(visit, model)
    return found


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _together(
    parts: list[jax.Array], axes: tuple[int, ...], shape: tuple[int, ...], layout: NamedSharding
) -> jax.Array:
    """Assembles one layer's weight from several tensors, one for each index of `axes`."""
    apart = jnp.stack(parts).reshape(*(shape[axis] for axis in axes), *parts[0].shape)
    return jax.sharding.reshard(jnp.moveaxis(apart, range(len(axes)), axes), layout)


def shares(size: int, mesh: Mesh) -> tuple[int, NamedSharding]:
    """Returns the padded length of `size` values, and a layout with a slice on each device."""
    count = mesh.devices.size
    return -(-size // count) * count, NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _read(name: str, source: Stored, mesh: Mesh) -> jax.Array:
    """Reads the tensor's values as a flat array, zero-padded and split over the devices.

    Raises FolderError if a value is not finite.
    """
    values = _flat(source, mesh)
    check_finite(name, source, values)
    return values


def _flat(source: Stored, mesh: Mesh) -> jax.Array:
    padded, layout = shares(source.size, mesh)

    def share(index: Any) -> np.ndarray:
        start, end, _ = index[0].indices(padded)
        return source.read(min(start, source.size), min(end, source.size), room=end - start)

    return jax.make_array_from_callback((padded,), layout, share)


def _packed(source: Packed, mesh: Mesh) -> Values:
    return Values(source, *(_flat(each, mesh) for each in (source.codes, source.scales)))


def _matrix(packed: Values, tensor: Placed, share: Share, place: "_Place") -> FourBit | None:
    """The weight with the codes of the folder, if its blocks are whole on each device."""
    parts = packed.parts_of(tensor, share, place.weight, place.layout)
    if parts is None:
        return None
    cut = [_cut(flat, shape, own, place.layout, np.dtype(np.uint8)) for flat, shape, own in parts]
    return packed.matrix(place.weight, place.shape, cut)


# Jitted: otherwise each step would make an array of the whole matrix.
_dense = jax.jit(dense)


def whole(_: Weight, array: Any) -> jax.Array:
    """Returns a weight as one array."""
    return _dense(array) if isinstance(array, FourBit) else array


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _cut(
    flat: jax.Array, shape: tuple[int, ...], share: Share, layout: NamedSharding, dtype: DTypeLike
) -> jax.Array:
    """Extracts a weight from the padded values of a tensor of `shape`.

    Each device temporarily holds the whole tensor.
    """
    whole = jax.sharding.reshard(flat, NamedSharding(layout.mesh, PartitionSpec()))
    weight = share.cut(whole[: math.prod(shape)].reshape(shape)).astype(dtype)
    return jax.sharding.reshard(weight, layout)


def _stack(layers: int, one: jax.Array) -> jax.Array:
    """Returns zeros for `layers` arrays like `one`."""
    assert isinstance(one.sharding, NamedSharding)
    layout = NamedSharding(one.sharding.mesh, PartitionSpec(None, *one.sharding.spec))
    return jnp.zeros((layers, *one.shape), one.dtype, device=layout)


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, array: jax.Array, layer: jax.Array) -> jax.Array:
    """Writes a layer's array into `stack`, reusing its buffer."""
    return jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0)


def check_finite(name: str, source: Stored, values: ArrayLike) -> None:
    """Raises FolderError if the values of a tensor are not floats, or not all finite.

    The file is read again only to locate the first fault. All processes find the same.

    Args:
      name: the tensor's name in the folder.
      values: all values of `source`, on the host or on devices.
    """
    if source.dtype not in DTYPES.values():
        raise FolderError(
            f"{source.file}: {name} has values of {source.dtype}, but weights are floats: "
            f"{', '.join(DTYPES)}"
        )
    if np.isfinite(values).all() if isinstance(values, np.ndarray) else _all_finite(values):
        return
    with np.errstate(over="ignore"):  # values may exceed float32
        read = source.read(0, source.size).astype(np.float32)
    (wrong,) = np.nonzero(~np.isfinite(read))
    index = tuple(int(i) for i in np.unravel_index(wrong[0], source.shape))
    raise FolderError(
        f"{source.file}: {len(wrong):,} of {source.size:,} values of {name} are not finite in "
        f"float32, the first is {read[wrong[0]]} at {index}"
    )


@jax.jit
def _all_finite(values: jax.Array) -> jax.Array:
    return jnp.isfinite(values).all()
