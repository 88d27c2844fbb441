"""The tensors of a GGUF file: their names, their shapes, and how their values are stored."""

import math
import re
from collections.abc import Iterable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from lmlib.gguf.architectures import Architecture
from lmlib.hf.names import Placed

KINDS = {
    "float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16, "q8_0": Kind.Q8_0,
    "q4_0": Kind.Q4_0,
}  # fmt: skip
_BLOCK = 32  # weights with one scale, in Q8_0 and Q4_0
_WIDE = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight")  # stay in float32
_VOCABULARY = ("token_embd.weight", "output.weight")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+\.weight)")


def grouped(
    wanted: Iterable[Placed], architecture: Architecture, layers: int
) -> dict[str, list[Placed]]:
    """Returns the tensors of a Hugging Face folder that each tensor of a GGUF file holds.

    All experts of a layer are one tensor there. Raises ValueError if a tensor has no name there.
    """
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture.name], layers)
    found: dict[str, list[Placed]] = {}
    for tensor in wanted:
        merged = _EXPERT.sub(r"\1.\2", tensor.name)
        name = names.get_name(merged, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"{tensor.name} has no name in llama.cpp's {architecture.name}")
        found.setdefault(name, []).append(tensor)
    return found


def is_stack(name: str) -> bool:
    """True if the tensor holds the matrices of all experts, one after another."""
    return "_exps." in name


def shape_of(name: str, group: list[Placed], architecture: Architecture) -> tuple[int, ...]:
    """Returns the tensor's shape in a GGUF file, as NumPy states it."""
    change = architecture.change(name)
    shape = group[0].shape[::-1] if change and change.transposes else group[0].shape
    return (len(group), *shape) if is_stack(name) else shape


def kind_of(name: str, shape: tuple[int, ...], kind: Kind) -> Kind:
    """Returns how a tensor is stored in a file of `kind`."""
    if len(shape) == 1 or name.endswith(_WIDE):
        return Kind.F32
    if kind in (Kind.Q8_0, Kind.Q4_0) and shape[-1] % _BLOCK:
        return Kind.F16
    return Kind.Q8_0 if kind is Kind.Q4_0 and name in _VOCABULARY else kind


def size_of(shape: tuple[int, ...], kind: Kind) -> int:
    """Returns the tensor's bytes."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def stored(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Returns float32 values as a file of `kind` holds them, as the package `gguf` rounds them."""
    with np.errstate(over="ignore"):
        return gguf.quants.quantize(np.ascontiguousarray(values, np.float32), kind)
