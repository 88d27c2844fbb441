"""Saves models to folders that Hugging Face's `from_pretrained` loads.

Each tensor is assembled on the devices; each process writes contiguous slices of it.
"""

import functools
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lmlib.hf import four_bit
from lmlib.hf.families import FAMILIES, family_of
from lmlib.hf.folder import parsed, read_copied
from lmlib.hf.hub import TOKENIZER_FILES
from lmlib.hf.load import Progress, shares
from lmlib.hf.names import Placed, Share, concatenate_shares, placed, repeated
from lmlib.hf.tensor_files import DTYPES, Stored, begin_files, laid_out, write
from lmlib.models.decoder import Decoder
from lmlib.models.experts.router import without_load
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.multi_token import without_heads
from lmlib.parallel.axes import map_weights
from lmlib.parallel.mesh import make_mesh
from lmlib.parallel.selection import named_weights
from lmlib.storage.atomic_file import UNFINISHED, sync, write_atomically
from lmlib.storage.stored_json import parse_json

NAMES_OF_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Rounding(NamedTuple):
    """The difference between a file's values and the weights.

    Attributes:
      dtype: dtype of the file.
      largest: the largest relative change, |rounded - value| / |value|; 0 if all values are exact.
      tensor: the tensor with the largest change; `None` if all values are exact.
    """

    dtype: str
    largest: float
    tensor: str | None

    def __str__(self) -> str:
        if self.tensor is None:
            return f"{self.dtype}, which keeps every value"
        return f"{self.dtype}, which rounds by up to {self.largest:.2%} (in {self.tensor})"


def save(
    model: Decoder,
    folder: str | Path,
    *,
    model_type: str | None = None,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    longest: int | None = None,
    settings: Mapping[str, Any] | None = None,
    file_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
    families: Sequence[Family] = FAMILIES,
) -> Rounding:
    """Writes a model in Hugging Face's format, and returns the rounding error of the dtype.

    Writes config.json, generation_config.json, safetensors with their index, and the tokenizer's
    files. With several processes, each must call this, and all must see the folder. Raises
    ValueError if the model belongs to no family, `dtype` is unknown, or a weight exceeds its range,
    FileExistsError if the folder is not empty, FileNotFoundError if `tokenizer` contains no
    tokenizer, and FolderError if a file of `tokenizer` is damaged, or a link that points outside
    its folder. Heads of multi-token prediction are left out if the family has no tensors for them.

    Args:
      folder: new, or empty.
      model_type: value in config.json, if several families have this model, such as Llama and
        Phi-3. `None`: the first of them.
      tokenizer: a folder with a tokenizer's files, or a tokenizer.json; they are copied.
      dtype: dtype of the file, "bfloat16", "float16" or "float32"; `None`: the weights' dtype,
        which keeps every value. Tensors that the family keeps in float32 stay in float32. "nf4"
        writes matrices of layers as bitsandbytes does, "mxfp4" experts of gpt-oss, and all else in
        bfloat16; the rounding to 4 bits is not in the result.
      longest: the longest sequence in training, written as `max_position_embeddings` unless the
        model itself defines that.
      settings: more keys of config.json, such as `bos_token_id` and `eos_token_id`.
      file_bytes: approximate maximum size of a file.
      progress: called with the bytes written so far and the total, after each tensor.
      families: the known families; may include your own.
    """
    folder, model = Path(folder), without_load(model)
    dtype = dtype or jnp.result_type(*jax.tree.leaves(model)).name
    if dtype not in (*NAMES_OF_DTYPES, *four_bit.KINDS):
        known = ", ".join((*NAMES_OF_DTYPES, *four_bit.KINDS))
        raise ValueError(f"dtype must be one of {known}, got {dtype!r}")
    kind, dtype = (dtype, "bfloat16") if dtype in four_bit.KINDS else (None, dtype)
    family, content = family_of(model, model_type, families)
    model = model if family.names.heads else without_heads(model)
    texts = {} if tokenizer is None else _tokenizer_files(Path(tokenizer))
    require_new(folder)
    content |= {
        "architectures": [family.transformers_class],
        "dtype": dtype,
        **(
            {}
            if longest is None or content.keys() & {"n_positions", "max_position_embeddings"}
            else {"max_position_embeddings": longest}
        ),
        **(settings or {}),
    }
    wanted = placed(model, family.names)
    by_name = {each.name: each for each in wanted}
    copies = repeated(model, family.names)
    wanted += [by_name[of]._replace(name=name) for name, of in copies.items()]
    packed = {} if kind is None else _in_four_bits(model, wanted, kind)
    if kind is not None:
        if not packed:
            raise ValueError(f"no tensor of {family.model_type} can be written in {kind}")
        routers = [n for n in by_name if n not in packed and n.endswith("router.weight")]
        kept = ["lm_head", *(name.removesuffix(".weight") for name in routers)]
        content["quantization_config"] = four_bit.config_of(kind, kept)
    unfinished = folder / UNFINISHED  # until all tensors are written; missing bytes are zeros
    wide = {
        each.name: (DTYPES[NAMES_OF_DTYPES[each.dtype_in(dtype)]], each.shape)
        for each in wanted
        if each.name not in packed
    }
    narrow = {name: part for parts in packed.values() for name, part in parts.items()}
    files = laid_out(unfinished, wide | narrow, file_bytes)
    if jax.process_index() == 0:
        unfinished.mkdir(parents=True)
        begin_files(files)
    meet("lmlib: files begun")
    rounded, beyond = _write_all(model, wanted, files, dtype, progress, kind, packed)
    if beyond is not None:
        meet("lmlib: a value is out of range")
        if jax.process_index() == 0:
            shutil.rmtree(folder)
        raise beyond
    for file in {each.file for each in files.values()}:
        sync(file)
    meet("lmlib: tensors written")
    if jax.process_index() == 0:
        move_up(unfinished)
        for name, text in texts.items():
            write_atomically(folder / name, text)
        if texts and "tokenizer_config.json" not in texts:
            fast = _tokenizer_config(texts.get("tokenizer.json", b"{}"), content)
            write_atomically(folder / "tokenizer_config.json", json.dumps(fast, indent=2) + "\n")
        ends = {key: content[key] for key in ("bos_token_id", "eos_token_id") if key in content}
        write_atomically(folder / "generation_config.json", json.dumps(ends, indent=2) + "\n")
        # Written last: a folder with a config is complete.
        write_atomically(
            folder / "config.json", json.dumps(content, indent=2, sort_keys=True) + "\n"
        )
    meet("lmlib: folder written")
    return rounded


def _in_four_bits(model: Decoder, wanted: Sequence[Placed], kind: str) -> dict[str, four_bit.Parts]:
    """Returns the parts of each tensor that is written in 4 bits."""
    weights = named_weights(model)
    found = {each.name: four_bit.parts_in_file(kind, each, weights) for each in wanted}
    return {name: parts for name, parts in found.items() if parts is not None}


def _write_all(
    model: Decoder,
    wanted: Sequence[Placed],
    files: Mapping[str, Stored],
    dtype: str,
    progress: Progress | None,
    kind: str | None,
    packed: Mapping[str, four_bit.Parts],
) -> tuple[Rounding, ValueError | None]:
    """Writes all tensors, those of `packed` in 4 bits.

    Returns an error, the same on all processes, for a value out of range.
    """
    weights: dict[str, jax.Array] = {}
    map_weights(lambda weight, array: weights.update({weight.path: array}), model)
    sharding = next(iter(weights.values())).sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if mesh is None:  # weights made without a mesh
        mesh = make_mesh(devices=list(sharding.device_set))
        whole = NamedSharding(mesh, PartitionSpec())
        weights = {path: jax.device_put(array, whole) for path, array in weights.items()}
    total = sum(each.bytes for each in files.values())
    written, worst = 0, Rounding(dtype, 0.0, None)
    for tensor in wanted:
        parts = packed.get(tensor.name)
        made = np.dtype(np.float32) if parts is not None else files[tensor.name].dtype
        kinds = tuple(
            (piece.share, piece.repetition is not None, tuple(place for place, _ in piece.fixed))
            for piece in tensor.pieces
        )
        at = [[piece.repetition or 0, *(i for _, i in piece.fixed)] for piece in tensor.pieces]
        weights_of = [weights[piece.path] for piece in tensor.pieces]
        layout = tensor.shape, kinds, made, mesh
        flat, lost, change = _joined(np.array(at, np.int32), weights_of, *layout)
        if lost:
            return worst, out_of_range(tensor.name, float(lost), made.name)
        if change > worst.largest:
            worst = Rounding(dtype, float(change), tensor.name)
        if parts is None:
            _write_shares(flat, files[tensor.name])
        elif kind is not None:
            values = four_bit.values_in_file(kind, tensor, flat, [*parts])
            if jax.process_index() == 0:
                for name, array in values.items():
                    write(files[name], 0, array)
        written += sum(files[name].bytes for name in parts or (tensor.name,))
        if progress is not None:
            progress(written, total)
    return worst, None


def out_of_range(name: str, value: float, dtype: str) -> ValueError:
    return ValueError(
        f"{name} holds {value:g}, which would become infinite in {dtype}, whose values end at "
        f"{float(jnp.finfo(dtype).max):g}: give bfloat16 or float32"
    )


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _joined(
    at: jax.Array,
    weights: list[jax.Array],
    shape: tuple[int, ...],
    kinds: tuple[tuple[Share, bool, tuple[int, ...]], ...],
    dtype: np.dtype,
    mesh: Mesh,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Assembles a tensor's padded values from its weights, a contiguous slice on each device.

    Also returns the value of largest magnitude that `dtype` makes infinite, or 0, and the largest
    relative change of the other values.

    Args:
      at: for each weight, the layer, and the index along each axis that is in the tensor's name.
      kinds: for each weight, its share, True if it is stacked, and the axes in the tensor's name.
    """
    padded, layout = shares(math.prod(shape), mesh)
    own = []
    for (_, stacked, places), weight, (layer, *indices) in zip(kinds, weights, at, strict=True):
        if stacked:
            weight = jax.lax.dynamic_index_in_dim(weight, layer, keepdims=False)
        for place, index in reversed([*zip(places, indices, strict=True)]):
            weight = _taken(weight, place, index)
        own.append(jax.sharding.reshard(weight, NamedSharding(mesh, PartitionSpec())))
    flat = concatenate_shares([share for share, _, _ in kinds], own).reshape(-1)
    flat = jax.sharding.reshard(jnp.pad(flat, (0, padded - flat.size)), layout)
    rounded = flat.astype(dtype)
    if jnp.promote_types(flat.dtype, dtype) == dtype:
        return rounded, jnp.zeros(()), jnp.zeros(())
    wide, narrow = flat.astype(jnp.float32), rounded.astype(jnp.float32)
    lost = jnp.where(jnp.isfinite(wide) & ~jnp.isfinite(narrow), wide, 0)
    most, least = jnp.max(lost), jnp.min(lost)
    is_changed = jnp.isfinite(narrow) & (narrow != wide)
    change = jnp.abs(narrow - wide) / jnp.where(is_changed, jnp.abs(wide), 1)
    change = jnp.max(jnp.where(is_changed, change, 0))
    return rounded, jnp.where(-least > most, least, most), change


def _taken(x: jax.Array, axis: int, index: jax.Array) -> jax.Array:
    """Returns `x` at `index` of an axis that may be split over devices.

    It sums bits over the axis, with all other entries set to zero, so only one slice is sent.
    """
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    chosen = jax.lax.broadcasted_iota(jnp.int32, (x.shape[axis],), 0) == index
    chosen = jnp.expand_dims(chosen, [other for other in range(x.ndim) if other != axis])
    taken = jnp.sum(jnp.where(chosen, bits, 0), axis, dtype=bits.dtype)
    return jax.lax.bitcast_convert_type(taken, x.dtype)


def _write_shares(flat: jax.Array, target: Stored) -> None:
    """Writes this process's slices of the tensor; a slice on several devices is written once."""
    for shard in flat.addressable_shards:
        start, end, _ = shard.index[0].indices(flat.size)
        if shard.replica_id == 0 and start < target.size:
            write(target, start, np.asarray(shard.data)[: min(end, target.size) - start])


def _tokenizer_files(source: Path) -> dict[str, bytes]:
    """Returns the contents of the tokenizer's files, by their names in a folder."""
    if source.is_file():  # the user named this file, so links may point anywhere
        real = Path(os.path.realpath(source))
        content = read_copied(real.parent, [real.name])[real.name]
        parsed(source, content)
        return {"tokenizer.json": content}
    found = read_copied(source, TOKENIZER_FILES)
    if not found:
        raise FileNotFoundError(
            f"{source} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}"
        )
    return found


def _tokenizer_config(tokenizer_json: bytes, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings for `transformers` that tokenizer.json lacks: begin and end tokens."""
    told = {"tokenizer_class": "PreTrainedTokenizerFast"}
    added = parse_json(tokenizer_json).get("added_tokens")
    tokens = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    for token in ("bos_token", "eos_token"):
        said = content.get(f"{token}_id")
        first = said[0] if isinstance(said, list) and said else said  # a text may have several
        for each in tokens:
            if type(first) is int and each.get("id") == first:
                told[token] = str(each.get("content"))
    return told


def require_new(folder: Path) -> None:
    """Raises FileExistsError on every process if `folder` is not empty on one of them.

    No process goes on to write before all have checked.
    """
    holds = folder.exists() and any(folder.iterdir())
    if jax.process_count() > 1:
        holds = bool(multihost_utils.process_allgather(np.bool_(holds)).any())
    if holds:
        raise FileExistsError(f"{folder} is not empty: give a new folder")


def move_up(folder: Path) -> None:
    """Moves the files of a folder to its parent, and removes it."""
    for file in folder.iterdir():
        file.rename(folder.parent / file.name)
    folder.rmdir()


def meet(name: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
