"""Maps a model's weights to the tensors of a folder, using the names of its family.

Reshaping, transposing and splitting follow from the names of axes, in both directions. Values may
be arrays of JAX, or of NumPy, for which nothing is compiled.
"""

import collections
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from lmlib.models.families.hugging_face.family import Names, Tensor
from lmlib.parallel.axes import Weight, map_weights

A = TypeVar("A", jax.Array, np.ndarray)


class Share(NamedTuple):
    """The part of a tensor that is one layer's weight."""

    # axes, sizes: axes and sizes of the weight
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    within: tuple[str, ...]  # axes of the tensor, each made of one or several axes of the weight
    along: int  # the axis of the tensor along which several weights are concatenated
    start: int  # the first index of this part along it
    # number of equal groups along this axis, each with a part of every weight; `start` counts
    # within a group
    groups: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        size = dict(zip(self.axes, self.sizes, strict=True))
        return tuple(math.prod(size[axis] for axis in each.split()) for each in self.within)

    @property
    def length(self) -> int:
        """The length of this part in one group."""
        return self.shape[self.along] // self.groups

    def cut(self, tensor: A) -> A:
        """Extracts the weight's values from the tensor."""
        chosen = slice(self.start, self.start + self.length)
        share = _grouped(tensor, self)[(slice(None),) * (self.along + 1) + (chosen,)]
        order = " ".join(self.within).split()
        split = share.reshape([self.sizes[self.axes.index(axis)] for axis in order])
        return split.transpose([order.index(axis) for axis in self.axes])

    def joined(self, weight: A) -> A:
        """Inverse of `cut`, for a tensor that contains only this weight."""
        order = " ".join(self.within).split()
        ordered = weight.transpose([self.axes.index(axis) for axis in order])
        return ordered.reshape(self.shape)


def concatenate_shares(shares: Sequence[Share], weights: Sequence[A]) -> A:
    """Assembles the tensor that consists of these shares, from the values of their weights."""
    parts = [
        _grouped(share.joined(weight), share)
        for share, weight in zip(shares, weights, strict=True)
    ]  # fmt: skip
    axis = shares[0].along
    whole = parts[0].__array_namespace__().concatenate(parts, axis=axis + 1)
    return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])


def _grouped(tensor: Any, share: Share) -> Any:
    """Adds a group axis before the axis along which weights are concatenated."""
    shape, axis = tensor.shape, share.along
    length = shape[axis] // share.groups
    return tensor.reshape(*shape[:axis], share.groups, length, *shape[axis + 1 :])


class Piece(NamedTuple):
    """A weight in a tensor."""

    path: str  # in the model
    repetition: int | None  # index in the weight's stack; `None`: not stacked
    share: Share  # the weight's part of the tensor, without the axes in `fixed`
    # maps axes of the weight, by position, to their indices in the tensor's name
    fixed: tuple[tuple[int, int], ...] = ()

    @property
    def at(self) -> tuple[int | slice, ...]:
        """NumPy index of the piece in the weight."""
        fixed = dict(self.fixed)
        own = (fixed.get(place, slice(None)) for place in range(max(fixed, default=-1) + 1))
        return (*(() if self.repetition is None else (self.repetition,)), *own)


class Placed(NamedTuple):
    """A tensor of a folder: its full shape, its weights in order, and dtypes.

    `float32_in` are the file dtypes for which the tensor stays in float32.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    float32_in: tuple[str, ...] = ()

    def dtype_in(self, dtype: str) -> str:
        """Returns the tensor's dtype in a file of `dtype`."""
        return "float32" if dtype in self.float32_in else dtype


def placed(model: Any, names: Names) -> list[Placed]:
    """Returns the tensors of `model` (arrays or shapes), with every weight exactly once.

    Raises:
      ValueError: if a weight is in no tensor, or a tensor's axes do not match its weights' axes.
    """
    weights = _weights(model)
    found: list[Placed] = []
    for tensor in names.outside:
        if all(path in weights for path in tensor.holds):
            found += _placed(tensor, "", {path: (path, None) for path in tensor.holds}, weights)
    layers = [*_layers(weights)]
    blocks = [(names.prefix.format(layer=i), *each) for i, each in enumerate(layers)]
    for depth in range(len(_heads(model))):
        own, prefix = f"predictors.{depth}", names.head.format(layer=len(layers) + depth)
        blocks.append((prefix + names.layer_in_head, f"{own}.stack.patterns.0.0", 0))
        for tensor in names.heads:
            paths = {path: (f"{own}.{path}", None) for path in tensor.holds}
            found += _placed(tensor, prefix, paths, weights)
    for prefix, block, repetition in blocks:
        for tensor in _of_layer(names, block, weights):
            within = {path: (f"{block}.{path}", repetition) for path in tensor.holds}
            found += _placed(tensor, prefix, within, weights)
    held = {piece.path for each in found for piece in each.pieces}
    if lost := sorted(set(weights) - held):
        raise ValueError(f"the family's names have no place for {', '.join(lost)}")
    return [each._replace(float32_in=names.float32_in(each.name)) for each in found]


def repeated(model: Any, names: Names) -> dict[str, str]:
    """Maps tensors of heads to the tensors outside layers with the same values."""
    tied = {"unembedding": "embedding"} if model.unembedding is None else {}
    first = model.stack.depth
    prefixes = [names.head.format(layer=first + i) for i in range(len(_heads(model)))]
    return {
        prefix + name: names.tensor_of(tied.get(path, path))
        for prefix in prefixes
        for name, path in names.repeated.items()
    }


def heads_in(there: Container[str], names: Names, layers: int) -> list[str]:
    """Returns the prefix of each head of multi-token prediction among tensors of these names."""
    found: list[str] = []
    while names.heads:
        prefix = names.head.format(layer=layers + len(found))
        if prefix in found or prefix + names.heads[0].name not in there:
            break
        found.append(prefix)
    return found


def _heads(model: Any) -> tuple[Any, ...]:
    return getattr(model, "predictors", ())


def least_count(model: Any, names: Names) -> tuple[int, int]:
    """Counts layers, and tensors of the most frequent kind (such as experts), without a list."""
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
    """A layer's weight: its axes, sizes, and stack length (`None`: not stacked)."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    layers: int | None


def _weights(model: Any) -> dict[str, _Weight]:
    """Returns the weights by path."""
    found: dict[str, _Weight] = {}

    def note(weight: Weight, array: Any) -> None:
        layers = array.shape[0] if weight.stacked else None
        found[weight.path] = _Weight(weight.own_axes, array.shape[weight.stacked :], layers)

    map_weights(note, model)
    return found


def _layers(weights: Mapping[str, _Weight]) -> Iterator[tuple[str, int]]:
    """Yields the block and the repetition of each layer, in order."""
    blocks: dict[int, dict[str, int]] = {}
    for path, weight in weights.items():
        if path.startswith("stack.") and weight.layers is not None:
            _, _, segment, j, _ = path.split(".", 4)
            blocks.setdefault(int(segment), {})[f"stack.patterns.{segment}.{j}"] = weight.layers
    for _, pattern in sorted(blocks.items()):
        for repetition in range(next(iter(pattern.values()))):
            yield from ((block, repetition) for block in pattern)


def _of_layer(names: Names, block: str, weights: Mapping[str, _Weight]) -> list[Tensor]:
    """Returns the tensors of a layer.

    Layers of different kinds may have weights with the same path and other axes, such as
    "attention.output": a tensor whose axes do not match is left out if another one does.
    """

    def there(tensor: Tensor) -> bool:
        return all(f"{block}.{path}" in weights for path in tensor.holds)

    def fits(tensor: Tensor) -> bool:
        return all(
            sorted([*tensor.enumerated, *" ".join(within).split()])
            == sorted(weights[f"{block}.{path}"].axes)
            for path, within in tensor.holds.items()
        )

    present = [tensor for tensor in names.layer if there(tensor)]
    held = {path for tensor in present if fits(tensor) for path in tensor.holds}
    return [tensor for tensor in present if fits(tensor) or held.isdisjoint(tensor.holds)]


def _placed(
    tensor: Tensor,
    prefix: str,
    paths: Mapping[str, tuple[str, int | None]],
    weights: Mapping[str, _Weight],
) -> Iterator[Placed]:
    """Yields the tensor, or one for each index of the axes in its name."""
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
        # Other weights of the same part may have this axis.
        part = paths[next(iter(tensor.holds))][0].rpartition(".")[0]
        near = [each for path, each in weights.items() if path.rpartition(".")[0] == part]
        every = {axis: n for each in near for axis, n in zip(each.axes, each.sizes, strict=True)}
        size |= {tensor.each: every[tensor.each]} if tensor.each in every else {}
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
                    f"{name}: {path} has {share.shape[tensor.along]} entries, which is not a "
                    f"multiple of {tensor.each} = {groups}"
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
      without_effect: suffixes of names that may exist and have no effect.

    Raises:
      ValueError: if tensors are missing, unknown or have a wrong shape; names them.
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
