"""How weights lie in a tensor of a folder: reshaping, transposing and splitting follow from the
names of axes, both ways. Values are arrays of JAX, or of NumPy: of those nothing is compiled."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

A = TypeVar("A", jax.Array, np.ndarray)


class Share(NamedTuple):
    """What of a tensor is a weight's, of one layer.

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
        """Of the share, in one group."""
        return self.shape[self.along] // self.groups

    def cut(self, tensor: A) -> A:
        """The weight's values out of the tensor."""
        chosen = slice(self.start, self.start + self.length)
        share = _grouped(tensor, self)[(slice(None),) * (self.along + 1) + (chosen,)]
        order = " ".join(self.within).split()
        split = share.reshape([self.sizes[self.axes.index(axis)] for axis in order])
        return split.transpose([order.index(axis) for axis in self.axes])

    def joined(self, weight: A) -> A:
        """The weight's values as they lie in a tensor that holds no other: the inverse of `cut`."""
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
