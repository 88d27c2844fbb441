"""The tensors of a GGUF file: their names, their shapes, and how their values are stored."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from lmlib.gguf.architectures import Architecture
from lmlib.gguf.changes import Change, Config
from lmlib.hf.names import Placed

KINDS = {
    "float32": Kind.F32, "float16": Kind.F16, "bfloat16": Kind.BF16, "q8_0": Kind.Q8_0,
    "q4_0": Kind.Q4_0,
}  # fmt: skip
_BLOCK = 32  # weights with one scale, in Q8_0 and Q4_0
_WIDE = (  # stay in float32
    "_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "shortconv.conv.weight",
    "ssm_conv1d.weight", "ssm_conv1d_q.weight", "ssm_conv1d_k.weight", "ssm_conv1d_v.weight",
    "ffn_gate_inp_shexp.weight",
)  # fmt: skip
_VOCABULARY = ("token_embd.weight", "output.weight")
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+\.weight)")


class Group(NamedTuple):
    """The tensors of a Hugging Face folder that a tensor of a GGUF file holds.

    Attributes:
      held: one tensor; or each expert's, which are stacked.
      stacked: True if they are stacked.
      change: how the tensor differs there, or `None`.
      part: the number of this tensor among those that `change` makes of one.
    """

    held: list[Placed]
    stacked: bool
    change: Change | None
    part: int

    def shape(self, config: Config) -> tuple[int, ...]:
        """Returns the tensor's shape in a GGUF file, as NumPy states it."""
        shape = self.held[0].shape
        if self.stacked:
            return (len(self.held), *shape)
        return self.there(np.broadcast_to(np.float32(0), shape), config).shape  # no copy

    @property
    def parts(self) -> int:
        """The number of tensors there that hold the same tensor of the folder."""
        return len(self.change.names) if self.change and self.change.names else 1

    def there(self, values: np.ndarray, config: Config) -> np.ndarray:
        """Returns the values in a GGUF file."""
        return values if self.change is None else self.change.there(values, config)[self.part]


def grouped(wanted: Iterable[Placed], architecture: Architecture, layers: int) -> dict[str, Group]:
    """Returns the content of each tensor of a GGUF file. Parts of one tensor follow each other.

    All experts of a layer are one tensor there. Raises ValueError if a tensor has no name there.
    """
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture.name], layers)
    found: dict[str, Group] = {}
    for tensor in wanted:
        merged = _EXPERT.sub(r"\1.\2", tensor.name)
        end, change = architecture.change(merged) or ("", None)
        ends = change.names if change is not None and change.names else (end,)
        for part, own_end in enumerate(ends):
            own = merged.removesuffix(end) + own_end
            name = names.get_name(own, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ValueError(f"{tensor.name} has no name in llama.cpp's {architecture.name}")
            group = found.setdefault(name, Group([], merged != tensor.name, change, part))
            group.held.append(tensor)
    return found


def kind_of(name: str, shape: tuple[int, ...], kind: Kind) -> Kind:
    """Returns how a tensor is stored in a file of `kind`."""
    if len(shape) == 1 or name.endswith(_WIDE) or not name.endswith(".weight"):
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
