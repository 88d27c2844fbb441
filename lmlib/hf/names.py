"""Which tensors of a folder hold which weights: a declaration, from which both ways follow.

    Tensor("self_attn.q_proj.weight", {"attention.query": ("heads head_dim", "embed")})

says that the file's matrix has the rows "heads head_dim" and the columns "embed", where the
weight's own axes are "embed heads head_dim": reshaping and transposing follow from the names.

Shapes: L layers.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lmlib.parallel.axes import Weight, map_weights


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a folder.

    Args:
      name: in the folder; of a layer, what follows the layer's prefix.
      holds: the axes of each weight in it, by the weight's path (in a layer: within the block); an
        axis of the tensor can be several of ours ("heads head_dim").
      along: the axis along which several weights follow each other.
    """

    name: str
    holds: Mapping[str, tuple[str, ...]]
    along: int = 0


@dataclasses.dataclass(frozen=True)
class Names:
    """The tensors of a family.

    Args:
      outside: those that are of no layer.
      layer: those of each layer.
      prefix: of the layers' names, with `{layer}` for the layer's number.
      base: what names of all but the head begin with; folders of a trunk alone leave it out.
      without_effect: ends of further names that a folder may hold, which mean nothing.
    """

    outside: Sequence[Tensor]
    layer: Sequence[Tensor]
    prefix: str = "model.layers.{layer}."
    base: str = "model."
    without_effect: tuple[str, ...] = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")

    def tensor_of(self, path: str) -> str:
        """The tensor that holds a weight which is of no layer."""
        return next(each.name for each in self.outside if path in each.holds)


class Share(NamedTuple):
    """What of a tensor is a weight's, of one layer.

    Args:
      axes, sizes: of the weight.
      within: axes of the tensor, each some of the weight's.
      along, start: the first index of the share, along which axis of the tensor.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    within: tuple[str, ...]
    along: int
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        size = dict(zip(self.axes, self.sizes, strict=True))
        return tuple(math.prod(size[axis] for axis in each.split()) for each in self.within)

    def cut(self, tensor: jax.Array) -> jax.Array:
        """The weight's values out of the tensor."""
        end = self.start + self.shape[self.along]
        share = jax.lax.slice_in_dim(tensor, self.start, end, axis=self.along)
        order = " ".join(self.within).split()
        split = jnp.reshape(share, [self.sizes[self.axes.index(axis)] for axis in order])
        return jnp.transpose(split, [order.index(axis) for axis in self.axes])

    def joined(self, weight: jax.Array) -> jax.Array:
        """The weight's values as they lie in the tensor: the inverse of `cut`."""
        order = " ".join(self.within).split()
        turned = jnp.transpose(weight, [self.axes.index(axis) for axis in order])
        return jnp.reshape(turned, self.shape)


class Piece(NamedTuple):
    """A weight in a tensor: its path in the model, the index in its stack (`None`: it is not
    stacked), and which share."""

    path: str
    repetition: int | None
    share: Share


class Placed(NamedTuple):
    """A tensor of a folder: its whole shape, and the weights in it, in their order along an
    axis."""

    name: str
    shape: tuple[int, ...]
    along: int
    pieces: tuple[Piece, ...]


def placed(model: Any, names: Names) -> list[Placed]:
    """The tensors of `model` (arrays or their shapes), every weight once.

    Raises:
      ValueError: if a weight is in no tensor, or a tensor's axes are not its weights'.
    """
    weights = _weights(model)
    found = []
    for tensor in names.outside:
        if all(path in weights for path in tensor.holds):
            found.append(
                _placed(tensor, tensor.name, {p: (p, None) for p in tensor.holds}, weights)
            )
    for number, (block, repetition) in enumerate(_layers(weights)):
        for tensor in names.layer:
            paths = {path: (f"{block}.{path}", repetition) for path in tensor.holds}
            if all(path in weights for path, _ in paths.values()):
                name = names.prefix.format(layer=number) + tensor.name
                found.append(_placed(tensor, name, paths, weights))
    held = {piece.path for each in found for piece in each.pieces}
    if lost := sorted(set(weights) - held):
        raise ValueError(f"the family's names have no place for {', '.join(lost)}")
    return found


def layer_count(model: Any) -> int:
    """How many layers have tensors of their own."""
    return sum(1 for _ in _layers(_weights(model)))


def _weights(model: Any) -> dict[str, tuple[Weight, tuple[int, ...]]]:
    """With their shapes, by path."""
    found: dict[str, tuple[Weight, tuple[int, ...]]] = {}
    map_weights(lambda weight, array: found.update({weight.path: (weight, array.shape)}), model)
    return found


def _layers(weights: Mapping[str, tuple[Weight, tuple[int, ...]]]) -> Iterator[tuple[str, int]]:
    """The block and the repetition of each layer, in order."""
    blocks: dict[int, dict[str, int]] = {}
    for path, (_, shape) in weights.items():
        if path.startswith("stack."):
            _, segment, j, _ = path.split(".", 3)
            blocks.setdefault(int(segment), {})[f"stack.{segment}.{j}"] = shape[0]
    for _, pattern in sorted(blocks.items()):
        for repetition in range(next(iter(pattern.values()))):
            yield from ((block, repetition) for block in pattern)


def _placed(
    tensor: Tensor,
    name: str,
    paths: Mapping[str, tuple[str, int | None]],
    weights: Mapping[str, tuple[Weight, tuple[int, ...]]],
) -> Placed:
    pieces: list[Piece] = []
    start = 0
    for own, within in tensor.holds.items():
        path, repetition = paths[own]
        weight, shape = weights[path]
        axes = weight.own_axes
        if sorted(" ".join(within).split()) != sorted(axes):
            raise ValueError(f"{name} names the axes {within} for {path}, whose axes are {axes}")
        sizes = tuple(shape[len(shape) - len(axes) :])
        share = Share(axes, sizes, tuple(within), tensor.along, start)
        pieces.append(Piece(path, repetition, share))
        start += share.shape[tensor.along]
    whole = list(pieces[0].share.shape)
    whole[tensor.along] = start
    return Placed(name, tuple(whole), tensor.along, tuple(pieces))


def check_complete(
    wanted: Sequence[Placed], there: Mapping[str, tuple[int, ...]], without_effect: Sequence[str]
) -> None:
    """Checks that each tensor is used exactly once.

    Args:
      there: shapes of the folder's tensors.
      without_effect: ends of names that may be there and mean nothing.

    Raises:
      ValueError: naming what is missing, misshapen or left over.
    """
    problems = []
    for tensor in wanted:
        if tensor.name not in there:
            problems.append(f"{tensor.name} is missing")
        elif tuple(there[tensor.name]) != tensor.shape:
            problems.append(
                f"{tensor.name} has shape {tuple(there[tensor.name])} instead of {tensor.shape}"
            )
    left = set(there) - {tensor.name for tensor in wanted}
    problems += [
        f"{name} is unknown" for name in sorted(left) if not name.endswith(tuple(without_effect))
    ]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError("; ".join(problems[:5]) + more)
