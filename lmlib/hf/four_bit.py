"""Tensors in 4 bits in folders: bitsandbytes' NF4, and the MXFP4 of gpt-oss' experts.

bitsandbytes stores NAME with NAME.absmax, NAME.quant_map, NAME.quant_state.bitsandbytes__nf4 and,
with double quantization, NAME.nested_absmax and NAME.nested_quant_map. Its blocks run over the
flattened tensor. MXFP4 is in NAME_blocks and NAME_scales, with the last two axes of NAME swapped.
A tensor is read as its codes and scales; it is expanded only if its model stores other numbers.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmlib.hf.folder import parsed
from lmlib.hf.names import Placed, Share
from lmlib.hf.tensor_files import Stored
from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.models.matrices import mxfp4, nf4
from lmlib.models.matrices.four_bit import FourBit, can_be_in_blocks, value_of
from lmlib.models.matrices.nf4 import order_of
from lmlib.parallel.axes import Weight

Parts = dict[str, tuple[np.dtype, tuple[int, ...]]]  # dtypes and shapes, by name
KINDS: dict[str, type[FourBit]] = {"nf4": nf4.Nf4, "mxfp4": mxfp4.Mxfp4}
_STATE = ".quant_state.bitsandbytes__nf4"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _STATE)
_LARGEST_STATE = 10_000  # bytes


class Packed(NamedTuple):
    """A tensor of a folder in 4 bits: its files, and the shape of the tensor that it stands for."""

    kind: str
    shape: tuple[int, ...]
    codes: Stored
    scales: Stored
    nested: np.ndarray | None = None  # of NF4 with double quantization
    offset: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(each.end - each.offset for each in (self.codes, self.scales))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def order(self, axes: Sequence[Any]) -> tuple[Any, ...]:
        """The order of the tensor's axes in the files; it is its own inverse."""
        return tuple(axes) if self.kind == "nf4" else (*axes[:-2], axes[-1], axes[-2])


def reads(config: Mapping[str, Any]) -> bool:
    """True if a config.json's `quantization_config` describes tensors that are read here."""
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return False
    if settings.get("quant_method") == "mxfp4":
        return config.get("model_type") == "gpt_oss"
    return (
        settings.get("quant_method") == "bitsandbytes"
        and settings.get("load_in_4bit") is True
        and settings.get("bnb_4bit_quant_type") == "nf4"
    )


def with_packed(there: Mapping[str, Stored]) -> dict[str, Any]:
    """Replaces the parts of each tensor in 4 bits by one `Packed`, under the tensor's name.

    Raises FolderError if parts are missing, or say something else than this format.
    """
    found: dict[str, Any] = dict(there)
    for state in [name for name in there if name.endswith(_STATE)]:
        name = state.removesuffix(_STATE)
        parts = {part: there[name + part] for part in _PARTS if name + part in there}
        if name not in there or ".absmax" not in parts:
            raise FolderError(f"{there[state].file}: {state} has no codes or no absmax beside it")
        found[name] = _in_nf4(name, there[name], parts)
        for part in parts:
            del found[name + part]
    for blocks in [name for name in there if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        if name + "_scales" not in there:
            raise FolderError(f"{there[blocks].file}: {blocks} has no {name}_scales beside it")
        found[name] = _in_mxfp4(blocks, there[blocks], there[name + "_scales"])
        del found[blocks], found[name + "_scales"]
    return found


def _in_nf4(name: str, codes: Stored, parts: Mapping[str, Stored]) -> Packed:
    file, state = codes.file, parts[_STATE]
    if state.size > _LARGEST_STATE:
        raise FolderError(f"{file}: {name}{_STATE} has {state.size:,} bytes")
    said = parsed(file, state.read(0, state.size).tobytes())
    nested, absmax = parts.get(".nested_absmax"), parts[".absmax"]
    shape, wide = said.get("shape"), nested is None
    if not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise FolderError(f"{file}: the quant_state of {name} has the shape {shape!r:.200}")
    size = math.prod(shape)
    wanted = {
        "blocksize": (said.get("blocksize"), nf4.BLOCK),
        "nested_blocksize": (said.get("nested_blocksize"), None if wide else nf4.NESTED_BLOCK),
        "codes": (codes.size, -(-size // 2)),
        "dtype of the codes": (codes.dtype, np.uint8),
        "absmax": (absmax.size, -(-size // nf4.BLOCK)),
        "dtype of absmax": (absmax.dtype, np.float32 if wide else np.uint8),
    }
    if nested is not None:
        wanted["nested_absmax"] = (nested.size, -(-absmax.size // nf4.NESTED_BLOCK))
        wanted["dtype of nested_absmax"] = (nested.dtype, np.float32)
    for what, (value, expected) in wanted.items():
        if value != expected:
            raise FolderError(f"{file}: {what} of {name} is {value!r:.200}, not {expected!r}")
    maps: dict[str, Any] = {
        ".quant_map": np.asarray(nf4.VALUES, np.float32),
        ".nested_quant_map": nf4.nested_map(),
    }
    for part, values in maps.items():
        if part in parts and not np.array_equal(parts[part].read(0, parts[part].size), values):
            raise FolderError(f"{file}: {name}{part} differs from bitsandbytes' map")
    offset = said.get("nested_offset", 0.0)
    scales = None if nested is None else nested.read(0, nested.size)
    finite = scales is None or bool(np.isfinite(scales).all())
    if not isinstance(offset, float) or not math.isfinite(offset) or not finite:
        raise FolderError(f"{file}: scales of {name} are not finite")
    return Packed("nf4", tuple(shape), codes, absmax, scales, offset)


def _in_mxfp4(name: str, blocks: Stored, scales: Stored) -> Packed:
    shape = blocks.shape
    sound = len(shape) > 2 and shape[-1] == mxfp4.BLOCK // 2 and scales.shape == shape[:-1]
    if not sound or not blocks.dtype == scales.dtype == np.uint8:
        raise FolderError(
            f"{blocks.file}: {name} has shape {shape} and scales {scales.shape}, which is not MXFP4"
        )
    rows = (*shape[:-2], shape[-2] * mxfp4.BLOCK)
    return Packed("mxfp4", (*rows[:-2], rows[-1], rows[-2]), blocks, scales)


class Values(NamedTuple):
    """A tensor's codes and scales on the devices, flat and split over them."""

    packed: Packed
    codes: jax.Array
    scales: jax.Array

    def parts_of(
        self, tensor: Placed, share: Share, weight: Weight, layout: NamedSharding
    ) -> list[tuple[jax.Array, tuple[int, ...], Share]] | None:
        """Codes and scales of a weight, each with its tensor's shape and the weight's share.

        `None` if the weight's blocks are not those of the tensor, or devices would split them.
        """
        kind = KINDS[self.packed.kind]
        if not can_be_in_blocks(weight, share.sizes, kind.BLOCK):
            return None
        if self.packed.kind == "nf4" and (len(tensor.pieces) > 1 or self.packed.nested is None):
            return None
        within, along = self.packed.order(share.within), self.packed.order(range(len(share.within)))
        places = order_of(weight.axes, weight.declaration.summed)
        if [weight.axes[place] for place in places] != " ".join(within).split():
            return None
        found = []
        for flat, divisor in ((self.codes, 2), (self.scales, kind.BLOCK)):
            sizes = [*share.sizes]
            sizes[places[-1]] //= divisor
            try:
                layout.shard_shape(tuple(sizes))
            except ValueError:
                return None
            shape = [*self.packed.order(tensor.shape)]
            shape[-1] //= divisor
            own = Share(
                share.axes, tuple(sizes), within, along[share.along], share.start, share.groups
            )
            found.append((flat, tuple(shape), own))
        return found

    def matrix(self, weight: Weight, shape: Sequence[int], parts: list[jax.Array]) -> FourBit:
        """The matrix of a weight from its codes and scales."""
        if self.packed.kind == "mxfp4":
            return mxfp4.matrix_of(weight, shape, parts)
        layout = parts[0].sharding
        assert isinstance(layout, NamedSharding)
        everywhere = NamedSharding(layout.mesh, PartitionSpec())
        for value in (self.packed.nested, self.packed.offset):
            array = np.asarray(value, np.float32)
            parts.append(jax.make_array_from_callback(array.shape, everywhere, array.__getitem__))
        return nf4.matrix_of(weight, shape, parts)

    def expanded(self) -> jax.Array:
        """The tensor's values in float32, flat, whole on each device."""
        nested = None if self.packed.nested is None else jnp.asarray(self.packed.nested)
        packed, offset = self.packed, jnp.float32(self.packed.offset)
        scales = packed.scales.size
        return _expanded(self.codes, self.scales, nested, offset, packed.kind, packed.shape, scales)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _expanded(
    codes: jax.Array,
    scales: jax.Array,
    nested: jax.Array | None,
    offset: jax.Array,
    name: str,
    shape: tuple[int, ...],
    blocks: int,
) -> jax.Array:
    layout = jax.typeof(codes).sharding
    whole = NamedSharding(layout.mesh, PartitionSpec())
    kind, size = KINDS[name], math.prod(shape)
    codes = jax.sharding.reshard(codes, whole)[: -(-size // 2)]
    scales = jax.sharding.reshard(scales, whole)[:blocks]
    if name == "mxfp4":
        bits = jnp.maximum(scales.astype(jnp.uint32) << 23, 1 << 22)
        scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
    elif nested is not None:
        table = jnp.asarray(nf4.nested_map())
        value = table.at[scales].get(mode="promise_in_bounds", out_sharding=whole)
        scales = value * jnp.repeat(nested, nf4.NESTED_BLOCK)[: len(scales)] + offset
    pair = [codes & 15, codes >> 4] if kind.LOW_FIRST else [codes >> 4, codes & 15]
    values = value_of(jnp.stack(pair, 1).reshape(-1)[:size], kind.VALUES)
    values *= jnp.repeat(scales, kind.BLOCK)[:size]
    if name == "nf4":
        return values
    *lead, length, rows = shape
    return values.reshape(*lead, rows, length).swapaxes(-1, -2).reshape(-1)


def parts_in_file(kind: str, tensor: Placed, weights: Mapping[str, Weight]) -> Parts | None:
    """Names, dtypes and shapes of the parts of a tensor that is written in 4 bits.

    `None` if it is written as it is: tables, norms, biases, routers, and what the kind cannot hold.
    """
    own = [(piece, weights[piece.path]) for piece in tensor.pieces]
    byte, wide = np.dtype(np.uint8), np.dtype(np.float32)
    for piece, weight in own:
        declared = weight.declaration
        excluded = {"vocab", "choice"} & {*weight.axes} or declared.dtype is not None
        within = piece.share.within
        last = within[-1] if kind == "nf4" else within[-2] if len(within) > 2 else ""
        if not declared.multiplied or excluded or last.split() != [*declared.summed]:
            return None
    if kind == "mxfp4":
        *lead, length, rows = tensor.shape
        if length % mxfp4.BLOCK:
            return None
        blocks = (*lead, rows, length // mxfp4.BLOCK)
        return {
            f"{tensor.name}_blocks": (byte, (*blocks, mxfp4.BLOCK // 2)),
            f"{tensor.name}_scales": (byte, blocks),
        }
    size = math.prod(tensor.shape)
    if len(tensor.shape) != 2 or size % nf4.BLOCK:
        return None
    number, text = size // nf4.BLOCK, _state(tensor.shape, 0.0)
    return {
        tensor.name: (byte, (size // 2, 1)),
        f"{tensor.name}.absmax": (byte, (number,)),
        f"{tensor.name}.nested_absmax": (wide, (-(-number // nf4.NESTED_BLOCK),)),
        f"{tensor.name}.nested_quant_map": (wide, (256,)),
        f"{tensor.name}.quant_map": (wide, (16,)),
        f"{tensor.name}{_STATE}": (byte, (len(text),)),
    }


def _state(shape: Sequence[int], offset: float) -> bytes:
    """bitsandbytes' settings of a tensor, of a length that does not depend on `offset`."""
    said = {
        "quant_type": "nf4", "blocksize": nf4.BLOCK, "dtype": "bfloat16", "shape": [*shape],
        "nested_blocksize": nf4.NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset,
    }  # fmt: skip
    text = json.dumps(said)
    return text.encode().ljust(len(text) - len(repr(offset)) + 30)


def values_in_file(
    kind: str, tensor: Placed, flat: jax.Array, parts: Sequence[str]
) -> dict[str, np.ndarray]:
    """The values of a tensor's parts, in the order of `parts_in_file`."""
    arrays = map(np.asarray, _quantized(kind, tensor.shape, flat))
    if kind == "mxfp4":
        return {name: array.reshape(-1) for name, array in zip(parts, arrays, strict=True)}
    codes, absmax, nested, offset = arrays
    state = np.frombuffer(_state(tensor.shape, float(offset)), np.uint8)
    maps: list[np.ndarray] = [nf4.nested_map(), np.asarray(nf4.VALUES, np.float32)]
    return dict(zip(parts, [codes, absmax, nested, *maps, state], strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _quantized(kind: str, shape: tuple[int, ...], flat: jax.Array) -> tuple[jax.Array, ...]:
    layout = jax.typeof(flat).sharding
    flat = jax.sharding.reshard(flat, NamedSharding(layout.mesh, PartitionSpec()))
    flat = flat[: math.prod(shape)]
    if kind == "mxfp4":
        return mxfp4.quantized(flat.reshape(shape).swapaxes(-1, -2), len(shape) - 1)
    codes, absmax = nf4.codes_of(flat, 0)
    return codes, *nf4.absmax_codes_of(absmax)


def config_of(kind: str, kept: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a folder in which the modules `kept` are not in 4 bits."""
    if kind == "mxfp4":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": [*kept],
    }  # fmt: skip
