"""How the state of an optimizer lies over the mesh: each array is split as its weight is."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec

_FEW = 4_096  # numbers that every device may hold: counts, keys, statistics of a whole model

_Keys = tuple[Any, ...]


def state_layout(state: Any, model: Any, mesh: AbstractMesh) -> Any:
    """Partitions of all arrays of an optimizer's `state` on `mesh`.

    An array is a weight's if the weight's path is a part of its own. It lies as the weight does if
    it has the weight's shape, and along those axes of the weight that it has if it has some of them
    alone, as factored moments do, or others besides. All else is whole on each device.

    Args:
      state: of shapes and dtypes.
      model: the weights, whose types say how they lie.

    Raises:
      ValueError: if an array of more than a few numbers would be whole on each of several devices
        though the weights are split.
    """
    leaves = jax.tree_util.tree_leaves_with_path(model)
    weights = {tuple(keys): jax.typeof(weight) for keys, weight in leaves}
    layout = {keys: weight.sharding.spec for keys, weight in weights.items()}

    def place(keys: _Keys, leaf: Any) -> PartitionSpec:
        own = _own_weight(keys, weights)
        if own is not None:
            weight = weights[own]
            if (found := _along(leaf.shape, weight.shape, layout[own])) is not None:
                return found
        whole = own is not None and not any(layout[own])
        if leaf.size > _FEW and mesh.size > 1 and not whole:
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            of = "no weight" if own is None else f"no part of its weight's {weights[own].shape}"
            raise ValueError(
                f"{name} of the optimizer's state is {leaf.dtype}{[*leaf.shape]}, the shape of "
                f"{of}, so it would be whole on each of {mesh.size} devices: take another "
                "optimizer, or one device"
            )
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(place, state)


def _own_weight(keys: _Keys, weights: Mapping[_Keys, Any]) -> _Keys | None:
    """The longest path of a weight that is a part of `keys`."""
    for length in range(len(keys), 0, -1):
        for start in range(len(keys) - length + 1):
            if keys[start : start + length] in weights:
                return keys[start : start + length]
    return None


def _along(
    shape: Sequence[int], of_weight: Sequence[int], layout: PartitionSpec
) -> PartitionSpec | None:
    """The partition of an array whose axes are some of a weight's, in their order, or all of them
    among others; one may have size 1 instead. `None` if it is no such array."""
    if math.prod(shape) == 1:
        return PartitionSpec()
    places, common = dict(enumerate(layout)), min(len(shape), len(of_weight))
    own = [*itertools.combinations(range(len(shape)), common)][::-1]  # others are rather in front
    for axes in itertools.product(own, itertools.combinations(range(len(of_weight)), common)):
        pairs = list(zip(*axes, strict=True))
        if all(shape[i] in (1, of_weight[j]) for i, j in pairs):
            split = {i: places.get(j) for i, j in pairs if shape[i] == of_weight[j]}
            return PartitionSpec(*map(split.get, range(len(shape))))
    return None
