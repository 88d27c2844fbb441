"""PEFT's names for the weights of a model, and their places in its tensors.

For a module's matrix [outputs, inputs], PEFT has lora_A [rank, inputs] and lora_B [outputs, rank].
The family's tensors say which weights are in the matrix, and where (`lmlib.hf.names`).

For a parameter [experts, outputs, inputs], which PEFT adapts instead of a module, it has lora_A
[experts · rank, inputs] and lora_B [outputs, rank · experts].
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lmlib.hf.names import Piece, Placed, Share, placed
from lmlib.models.families.hugging_face.family import Names
from lmlib.models.matrices.lora import EXPERTS, can_be_adapted, summed_axes
from lmlib.parallel.axes import Weight
from lmlib.parallel.selection import named_weights

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_RANK = "rank"


class Place(NamedTuple):
    """A weight in a module's matrix, or in all experts' matrices."""

    piece: Piece  # as in the base's folder
    summed: tuple[str, ...]  # the weight's axes that form the inputs of the matrix
    inputs: int  # the input axis of the matrix, 0 or 1
    # the expert axis of the weight, with a matrix for each index; empty for a single matrix
    apart: tuple[str, ...] = ()

    def down(self, rank: int) -> Share:
        """Returns the place in lora_A of the factor that multiplies the weight's inputs."""
        *_, rows, columns = self.piece.share.within
        within = (" ".join((*self.apart, _RANK)), (rows, columns)[self.inputs])
        axes = (*self.apart, *self.summed, _RANK)
        return Share(axes, self._sizes(axes, rank), within, 0, 0)

    def up(self, rank: int) -> Share:
        """Returns the place in lora_B of the factor that yields the weight's outputs."""
        share = self.piece.share
        *_, rows, columns = share.within
        within = ((rows, columns)[1 - self.inputs], " ".join((_RANK, *self.apart)))
        kept = [axis for axis in share.axes if axis not in (*self.apart, *self.summed)]
        axes = (*self.apart, _RANK, *kept)
        return Share(axes, self._sizes(axes, rank), within, 0, share.start, share.groups)

    @property
    def experts(self) -> int:
        """The number of matrices."""
        return math.prod(self._sizes(self.apart, 1))

    def _sizes(self, axes: Iterable[str], rank: int) -> tuple[int, ...]:
        share = self.piece.share
        sizes = {**dict(zip(share.axes, share.sizes, strict=True)), _RANK: rank}
        return tuple(sizes[axis] for axis in axes)


class Module(NamedTuple):
    """A module with a matrix, or a parameter with the experts' matrices."""

    name: str  # name of the module or the parameter
    places: tuple[Place, ...]  # its weights
    looks_up: bool  # True if the matrix is an embedding table
    around: int = 0  # number of adapted parameters of the same module that wrap it (`nested`)

    @property
    def is_parameter(self) -> bool:
        return bool(self.places[0].apart)

    @property
    def holder(self) -> str:
        """The module, or the module that contains the parameter."""
        return self.name.rpartition(".")[0] if self.is_parameter else self.name

    @property
    def end(self) -> str:
        """The last part of the name, which means all modules of this kind."""
        return ".".join(self.name.split(".")[-2 if self.is_parameter else -1 :])

    @property
    def magnitude(self) -> str:
        """The name of the magnitudes [outputs], with `use_dora`."""
        return f"{PREFIX}{self.name}.lora_magnitude_vector"

    @property
    def tensors(self) -> tuple[str, str]:
        """The names of lora_A and lora_B."""
        name = PREFIX + self.holder + ".base_layer" * self.around
        if self.looks_up:
            return f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"
        return f"{name}.lora_A.weight", f"{name}.lora_B.weight"

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of lora_A and lora_B."""
        outputs = [place.up(rank).shape for place in self.places]
        return self.places[0].down(rank).shape, (sum(n for n, _ in outputs), outputs[0][1])


def nested(adapted: Iterable[Module]) -> list[Module]:
    """Numbers the adapted parameters of a module, which determines the names of their tensors.

    PEFT wraps each further parameter of a module around the parameters before it.
    """
    found, around = list[Module](), Counter[str]()
    for module in reversed([*adapted]):
        found.append(module._replace(around=around[module.holder]))
        around[module.holder] += 1
    return found[::-1]


def modules_of(base: Any, names: Names) -> dict[str, Module]:
    """Returns the modules that PEFT can adapt, by name, for a model without adapters.

    Arrays of the model may be shapes. Each module's matrix has the inputs of its weights along one
    axis and the outputs along the other; experts' parameters consist of such matrices. A tied table
    is left out, because PEFT would adapt only its use as an embedding.
    """
    tied = base.unembedding is None
    found = _modules(tensors_in_class(base, names), named_weights(base), tied)
    return {
        name: each for name, each in found.items()
        if each.is_parameter or not name.endswith(names.not_adapted)
    }  # fmt: skip


def modules_of_experts(base: Any, names: Names) -> dict[str, Module]:
    """Like `modules_of`, for transformers 4, with a module for each expert's matrix.

    Names are as in a folder of the base.
    """
    tensors = [each for each in placed(base, names) if each.pieces[0].fixed]
    return _modules(tensors, named_weights(base), tied=True)


def _modules(
    tensors: Iterable[Placed], weights: Mapping[str, Weight], tied: bool
) -> dict[str, Module]:
    found = dict[str, Module]()
    for tensor in tensors:
        own = [weights[piece.path] for piece in tensor.pieces]
        if len(tensor.shape) < 2 or not all(map(can_be_adapted, own)):
            continue
        if tied and any("vocab" in weight.axes for weight in own):
            continue
        found_in = [_place(piece, weight) for piece, weight in zip(tensor.pieces, own, strict=True)]
        places = tuple(place for place in found_in if place is not None)
        if len(places) < len(found_in):
            continue
        shares_inputs = all(
            len(place.apart) + place.inputs != place.piece.share.along for place in places
        )
        if not shares_inputs and (len(places) > 1 or places[0].piece.share.groups > 1):
            continue  # weights with inputs of their own
        name = tensor.name.removesuffix(".weight")
        found[name] = Module(name, places, not own[0].declaration.multiplied)
    return found


def tensors_in_class(base: Any, names: Names) -> list[Placed]:
    """Returns a folder's tensors, named and grouped as in transformers' class."""
    held = {path for tensor in names.in_class for path in tensor.holds}
    layer = [tensor for tensor in names.layer if held.isdisjoint(tensor.holds)]
    return [
        tensor._replace(name=names.modules.get(tensor.name, tensor.name))
        for tensor in placed(base, dataclasses.replace(names, layer=[*layer, *names.in_class]))
    ]


def _place(piece: Piece, weight: Weight) -> Place | None:
    """Returns the place of a weight, or `None` if the inputs do not form one axis of the matrix."""
    apart, matrix = piece.share.within[:-2], piece.share.within[-2:]
    summed = summed_axes(weight.declaration, piece.share.axes)
    axes = [sorted(axis.split()) for axis in matrix]
    if sorted(summed) not in axes or apart not in ((), (EXPERTS,)):
        return None
    return Place(piece, summed, axes.index(sorted(summed)), apart)
