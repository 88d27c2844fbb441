"""What PEFT calls the weights of a model, and how they lie in its tensors.

Beside a module's matrix [outputs, inputs] PEFT has lora_A [rank, inputs] and lora_B
[outputs, rank]. Which weights are in the matrix, and how they lie there, is what the family says
of its tensors (`lmlib.hf.names`).
"""

from typing import Any, NamedTuple

from lmlib.hf.names import Names, Piece, Placed, placed
from lmlib.hf.share import Share
from lmlib.models.matrices.adapted import can_be_adapted, summed_axes
from lmlib.parallel.axes import Weight
from lmlib.parallel.selection import named_weights

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_RANK = "rank"


class Place(NamedTuple):
    """A weight in a module's matrix.

    Args:
      piece: as in the folder of the base.
      summed: its axes along which the matrix has its inputs.
      inputs: which axis of the matrix that is, 0 or 1.
    """

    piece: Piece
    summed: tuple[str, ...]
    inputs: int

    def down(self, rank: int) -> Share:
        """How what multiplies the weight's inputs lies in lora_A."""
        share = self.piece.share
        sizes = dict(zip(share.axes, share.sizes, strict=True))
        own = tuple(sizes[axis] for axis in self.summed)
        within = (_RANK, share.within[self.inputs])
        return Share((*self.summed, _RANK), (*own, rank), within, 0, 0)

    def up(self, rank: int) -> Share:
        """How what makes the weight's outputs lies in lora_B."""
        share = self.piece.share
        kept = {a: n for a, n in zip(share.axes, share.sizes, strict=True) if a not in self.summed}
        within = (share.within[1 - self.inputs], _RANK)
        axes, sizes = (_RANK, *kept), (rank, *kept.values())
        return Share(axes, sizes, within, 0, share.start, share.groups)


class Module(NamedTuple):
    """A module with a matrix: its name, which weights are in that, whether it looks rows up."""

    name: str
    places: tuple[Place, ...]
    looks_up: bool

    @property
    def tensors(self) -> tuple[str, str]:
        """The names of lora_A and lora_B."""
        name = PREFIX + self.name
        if self.looks_up:
            return f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"
        return f"{name}.lora_A.weight", f"{name}.lora_B.weight"

    @property
    def inputs(self) -> int:
        return self.places[0].down(1).shape[1]

    @property
    def outputs(self) -> int:
        return sum(place.up(1).shape[0] for place in self.places)


def modules_of(base: Any, names: Names) -> dict[str, Module]:
    """The modules of a model without adapters, whose arrays may be shapes, by their names: those
    whose matrix has the inputs of its weights along one axis and their outputs along the other. A
    tied table is not among them: PEFT would adapt it where it embeds alone."""
    weights, found = named_weights(base), dict[str, Module]()
    tied = base.unembedding is None
    for tensor in tensors_in_class(base, names):
        own = [weights[piece.path] for piece in tensor.pieces]
        if len(tensor.shape) != 2 or not all(map(can_be_adapted, own)) or tensor.pieces[0].fixed:
            continue
        if tied and any("vocab" in weight.axes for weight in own):
            continue
        found_in = [_place(piece, weight) for piece, weight in zip(tensor.pieces, own, strict=True)]
        places = tuple(place for place in found_in if place is not None)
        if len(places) < len(found_in):
            continue
        shares_inputs = all(place.inputs != place.piece.share.along for place in places)
        if not shares_inputs and (len(places) > 1 or places[0].piece.share.groups > 1):
            continue  # weights with inputs of their own
        name = tensor.name.removesuffix(".weight")
        if name.endswith(names.not_adapted):
            continue
        found[name] = Module(name, places, not own[0].declaration.multiplied)
    return found


def tensors_in_class(base: Any, names: Names) -> list[Placed]:
    """The tensors of a folder, by the names that they have in the class."""
    return [
        tensor._replace(name=names.modules.get(tensor.name, tensor.name))
        for tensor in placed(base, names)
    ]


def _place(piece: Piece, weight: Weight) -> Place | None:
    """`None` if no axis of the matrix has the weight's inputs and nothing else."""
    summed = summed_axes(weight.declaration, piece.share.axes)
    axes = [sorted(axis.split()) for axis in piece.share.within]
    if sorted(summed) not in axes:
        return None
    return Place(piece, summed, axes.index(sorted(summed)))
