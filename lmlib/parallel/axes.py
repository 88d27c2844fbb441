"""Declarations of a module's arrays: the name of each axis, and the array's use."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from lmlib.parallel.mesh_axes import MeshAxes

Axes = tuple[str | None, ...]
Rules = Mapping[str, MeshAxes]
M = TypeVar("M")

LAYER = "layer"  # unnamed leading axes of an array, for stacked layers
WHOLE_LAYER = "whole_layer"  # such an axis, if stages do not split the layers

# Metadata of a field that `lmlib.models.weights.weight` declares: a function of its module.
METADATA = "lmlib"


class LayoutError(ValueError):
    """A weight, batch or mesh that does not fit the layout tables."""


class PartError(ValueError):
    """An invalid return value of a user's part, with a message to print."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The arguments of `lmlib.models.weights.weight` for a field, with resolved defaults."""

    initial: Any = None
    decays: bool = False
    rules: Rules = dataclasses.field(default_factory=dict)
    summed: tuple[str, ...] = ()
    dtype: str | None = None
    learning_rate: float = 1.0
    gradient: bool = True
    writes: bool | None = None
    # how many neighbours along an axis one element stands for, if more than 1
    blocks: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def multiplied(self) -> bool:
        """True if products with activations sum over axes of the array."""
        return bool(self.summed)


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of a module: its path, and its field's declaration."""

    path: str  # dotted: "stack.patterns.0.0.attention.query"
    axes: tuple[str, ...]  # one for each axis of the array; unnamed leading axes are `LAYER`
    declaration: Declaration

    @property
    def stacked(self) -> int:
        """The number of leading axes for stacked layers."""
        return self.axes.count(LAYER)

    @property
    def unstaged(self) -> "Weight":
        """The same weight, with layers that stages do not split."""
        return dataclasses.replace(self, axes=(WHOLE_LAYER,) * self.stacked + self.own_axes)

    @property
    def own_axes(self) -> tuple[str, ...]:
        """The axes of one layer's array."""
        return self.axes[self.stacked :]


def axis_names(owner: Any, field: str) -> tuple[str, ...]:
    """The axis names of the array in `owner.field`, for a module or its class.

    They come from the mapping `owner.axis_names`, if it has the field, else from the field's
    jaxtyping annotation. Raises LayoutError if neither names axes.
    """
    own = getattr(owner, "axis_names", {})
    if isinstance(own, Mapping) and field in own:
        return tuple(own[field].split())
    kind = owner if isinstance(owner, type) else type(owner)
    annotation = _annotations(kind).get(field)
    # `Float[Array, "…"] | None` and unions of array types: use the one that names axes.
    for candidate in (annotation, *typing.get_args(annotation)):
        names = getattr(candidate, "dim_str", None)
        if names is not None:
            return tuple(names.split())
    raise LayoutError(
        f"{kind.__name__}.{field} holds an array but names no axes; annotate the field, "
        'for example `Float[Array, "embed mlp"]`, or, if it is a setting, make it '
        "`eqx.field(static=True)`"
    )


def declaration(owner: Any, field: str) -> Declaration:
    """The declaration of `owner.field`, for a module or its class; LayoutError if there is none."""
    kind = owner if isinstance(owner, type) else type(owner)
    metadata = {each.name: each.metadata for each in dataclasses.fields(kind)}[field]
    if METADATA in metadata:
        try:
            return metadata[METADATA](owner)
        except LayoutError as error:
            raise LayoutError(f"{kind.__name__}.{field}: {error}") from None
    raise LayoutError(
        f"{kind.__name__}.{field} holds an array but declares no initial values; declare them, for "
        "example `= weight(fan_in('embed'))` of lmlib.models.weights"
    )


@functools.cache
def _annotations(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def map_weights(function: Callable[[Weight, Any], Any], module: M) -> M:
    """Replaces each array of `module` by `function(weight, array)`.

    Raises LayoutError for a leaf that is not an array in a field with axes and a declaration.
    """

    def visit(keys: tuple[Any, ...], leaf: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if not hasattr(leaf, "shape"):
            raise LayoutError(
                f"{path} is {leaf!r}, which is not an array: make a setting "
                "`eqx.field(static=True)`, and a part an eqx.Module"
            )
        if not isinstance(keys[-1], jax.tree_util.GetAttrKey):
            raise LayoutError(f"{path} lies in a container; make each array a field of a module")
        owner: Any = module
        for key in keys[:-1]:
            by_name = isinstance(key, jax.tree_util.GetAttrKey)
            at = getattr(key, "idx", getattr(key, "key", None))
            owner = getattr(owner, key.name) if by_name else owner[at]
        names = axis_names(owner, keys[-1].name)
        stacked = len(leaf.shape) - len(names)
        if stacked < 0:
            raise LayoutError(f"{path} has shape {leaf.shape} but names the axes {' '.join(names)}")
        axes = (LAYER,) * stacked + names
        return function(Weight(path, axes, declaration(owner, keys[-1].name)), leaf)

    return jax.tree_util.tree_map_with_path(visit, module)
