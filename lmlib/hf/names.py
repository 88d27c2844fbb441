"""The places of a model's weights in the tensors of a folder, by the names of its family.

Reshaping, transposing and splitting follow from the names of axes, both ways. Values are arrays of
JAX, or of NumPy, for which nothing is compiled.
"""

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from lmlib.models.families.hugging_face.family import Names, Tensor
from lmlib.parallel.axes import Weight, map_weights

A = TypeVar("A", jax.Array, np.ndarray)


class Share(NamedTuple):
    """The part of a tensor that is a weight of one layer.

    Args:
      axes, sizes: of the weight.
      within: axes of the tensor, each some of the weight's.
      along: the axis of the tensor along which several weights follow each other.
      start: the first index of the share along it.
      groups: so many equal parts of that axis each hold a part of every weight; `start` counts
        within one.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    within: tuple[str, ...]
    along: int
    start: int
    groups: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        size = dict(zip(self.axes, self.sizes, strict=True))
        return tuple(math.prod(size[axis] for axis in each.split()) for each in self.within)

    @property
    def length(self) -> int:
        """The share's length in one group."""
        return self.shape[self.along] // self.groups

    def cut(self, tensor: A) -> A:
        """The weight's values out of the tensor."""
        chosen = slice(self.start, self.start + self.length)
        share = _grouped(tensor, self)[(slice(None),) * (self.along + 1) + (chosen,)]
        order = " ".join(self.within).split()
        split = share.reshape([self.sizes[self.axes.index(axis)] for axis in order])
        return split.transpose([order.index(axis) for axis in self.axes])

    def joined(self, weight: A) -> A:
        """The inverse of `cut`, for a tensor that holds no other weight."""
        order = " ".join(self.within).split()
        ordered = weight.transpose([self.axes.index(axis) for axis in order])
        return ordered.reshape(self.shape)


def joined(shares: Sequence[Share], weights: Sequence[A]) -> A:
    """The tensor that these shares make up, of the values of their weights."""
    parts = [
        _grouped(share.joined(weight), share)
        for share, weight in zip(shares, weights, strict=True)
    ]  # fmt: skip
    axis = shares[0].along
    whole = parts[0].__array_namespace__().concatenate(parts, axis=axis + 1)
    return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])


def _grouped(tensor: Any, share: Share) -> Any:
    """With an axis for the groups before that along which weights follow each other."""
    shape, axis = tensor.shape, share.along
    length = shape[axis] // share.groups
    return tensor.reshape(*shape[:axis], share.groups, length, *shape[axis + 1 :])


class Piece(NamedTuple):
    """A weight in a tensor.

    Args:
      path: in the model.
      repetition: the index in its stack; `None`: it is not stacked.
      share: its part of the tensor, without the axes below.
      fixed: the index along each of the weight's own axes that the tensor's name enumerates, by the
        axis' place.
    """

    path: str
    repetition: int | None
    share: Share
    fixed: tuple[tuple[int, int], ...] = ()

    @property
    def at(self) -> tuple[int | slice, ...]:
        """Its index in the weight, for NumPy."""
        fixed = dict(self.fixed)
        own = (fixed.get(place, slice(None)) for place in range(max(fixed, default=-1) + 1))
        return (*(() if self.repetition is None else (self.repetition,)), *own)


class Placed(NamedTuple):
    """A tensor of a folder: its whole shape, the weights in it, in their order, and the dtypes of
    files that hold it in float32."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    float32_in: tuple[str, ...] = ()

    def dtype_in(self, dtype: str) -> str:
        """Its dtype in a file of `dtype`."""
        return "float32" if dtype in self.float32_in else dtype


def placed(model: Any, names: Names) -> list[Placed]:
    """The tensors of `model` (arrays or their shapes), every weight once.

    Raises:
      ValueError: if a weight is in no tensor, or a tensor's axes are not its weights'.
    """
    weights = _weights(model)
    found: list[Placed] = []
    for tensor in names.outside:
        if all(path in weights for path in tensor.holds):
            found += _placed(tensor, "", {path: (path, None) for path in tensor.holds}, weights)
    for number, (block, repetition) in enumerate(_layers(weights)):
        for tensor in names.layer:
            paths = {path: (f"{block}.{path}", repetition) for path in tensor.holds}
            if all(path in weights for path, _ in paths.values()):
                found += _placed(tensor, names.prefix.format(layer=number), paths, weights)
    held = {piece.path for each in found for piece in each.pieces}
    if lost := sorted(set(weights) - held):
        raise ValueError(f"the family's names have no place for {', '.join(lost)}")
    return [each._replace(float32_in=names.float32_in(each.name)) for each in found]


def least_count(model: Any, names: Names) -> tuple[int, int]:
    """The number of layers that have tensors of their own, and how many of these tensors are of one
    kind, such as experts'; nothing is listed."""
    weights = _weights(model)
    layers = collections.Counter(block for block, _ in _layers(weights))
    alike = [0] * len(names.layer)
    for block, count in layers.items():
        for number, tensor in enumerate(names.layer):
            held = [weights[path] for own in tensor.holds if (path := f"{block}.{own}") in weights]
            size = {a: n for each in held for a, n in zip(each.axes, each.sizes, strict=True)}
            alike[number] += count * math.prod(size.get(axis, 0) for axis in tensor.enumerated)
    return layers.total(), max(alike, default=0)


class _Weight(NamedTuple):
    """The axes and sizes of a layer's weight, and how many are stacked (`None`: it is not)."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    layers: int | None


def _weights(model: Any) -> dict[str, _Weight]:
    """By path."""
    found: dict[str, _Weight] = {}

    def note(weight: Weight, array: Any) -> None:
        layers = array.shape[0] if weight.stacked else None
        found[weight.path] = _Weight(weight.own_axes, array.shape[weight.stacked :], layers)

    map_weights(note, model)
    return found


def _layers(weights: Mapping[str, _Weight]) -> Iterator[tuple[str, int]]:
    """The block and the repetition of each layer, in order."""
    blocks: dict[int, dict[str, int]] = {}
    for path, weight in weights.items():
        if path.startswith("stack.") and weight.layers is not None:
            _, _, segment, j, _ = path.split(".", 4)
            blocks.setdefault(int(segment), {})[f"stack.patterns.{segment}.{j}"] = weight.layers
    for _, pattern in sorted(blocks.items()):
        for repetition in range(next(iter(pattern.values()))):
            yield from ((block, repetition) for block in pattern)


def _placed(
    tensor: Tensor,
    prefix: str,
    paths: Mapping[str, tuple[str, int | None]],
    weights: Mapping[str, _Weight],
) -> Iterator[Placed]:
    """The tensor, or one for each index of the axes that its name enumerates."""
    size = dict[str, int]()
    for own, within in tensor.holds.items():
        axes, sizes, _ = weights[paths[own][0]]
        size |= zip(axes, sizes, strict=True)
        if sorted([*tensor.enumerated, *" ".join(within).split()]) != sorted(axes):
            named = ", ".join([*tensor.enumerated, *within])
            raise ValueError(
                f"{prefix}{tensor.name} names the axes {named} for {paths[own][0]}, whose axes are "
                f"{', '.join(axes)}"
            )
    if tensor.each is not None and tensor.each not in size:
        raise ValueError(f"{prefix}{tensor.name}: no weight in it has the axis {tensor.each}")
    groups = 1 if tensor.each is None else size[tensor.each]
    for indices in itertools.product(*(range(size[axis]) for axis in tensor.enumerated)):
        at = dict(zip(tensor.enumerated, indices, strict=True))
        name, pieces, start = prefix + tensor.name.format(**at), list[Piece](), 0
        for own, within in tensor.holds.items():
            path, repetition = paths[own]
            axes = weights[path].axes
            kept = tuple(axis for axis in axes if axis not in at)
            sizes = tuple(size[axis] for axis in kept)
            share = Share(kept, sizes, tuple(within), tensor.along, start, groups)
            if share.shape[tensor.along] % groups:
                raise ValueError(
                    f"{name}: {path} has {share.shape[tensor.along]} for {tensor.each} = {groups}, "
                    "of which that is no multiple"
                )
            fixed = tuple((place, at[axis]) for place, axis in enumerate(axes) if axis in at)
            pieces.append(Piece(path, repetition, share, fixed))
            start += share.length
        whole = list(pieces[0].share.shape)
        whole[tensor.along] = start * groups
        yield Placed(name, tuple(whole), tuple(pieces))


def check_complete(
    wanted: Sequence[Placed], there: Mapping[str, tuple[int, ...]], without_effect: Sequence[str]
) -> None:
    """Checks that each tensor is used exactly once.

    Args:
      there: shapes of the folder's tensors.
      without_effect: ends of names that may be there and mean nothing.

    Raises:
      ValueError: naming tensors that are missing, misshapen or left over.
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
