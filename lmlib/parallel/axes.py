"""What annotations say: the axis names of every array in a module."""

import functools
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

Axes = tuple[str | None, ...]
M = TypeVar("M", bound=eqx.Module)


class LayoutError(ValueError):
    """A weight, batch or mesh that does not fit the layout tables."""


def annotated_axes(owner: type, field: str) -> tuple[str, ...]:
    """The axis names in the jaxtyping annotation of `owner.field`.

    Raises:
      LayoutError: if the field has no such annotation.
    """
    annotation = _annotations(owner).get(field)
    # `Float[Array, "…"] | None` and unions of array types: the one that names axes speaks.
    for candidate in (annotation, *typing.get_args(annotation)):
        names = getattr(candidate, "dim_str", None)
        if names is not None:
            return tuple(names.split())
    raise LayoutError(
        f"{owner.__name__}.{field} holds an array but names no axes; annotate the field, "
        'for example `Float[Array, "embed mlp"]`'
    )


@functools.cache
def _annotations(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def map_weights(function: Callable[[str, Axes, Any], Any], module: M) -> M:
    """`module` with each array w replaced by `function(path, axes, w)`.

    `path` is dotted ("layers.attention.query"). `axes` has one entry for each axis of w; leading
    axes that the annotation does not name (stacked layers) are `None`.

    Raises:
      LayoutError: if an array has no annotation, or fewer axes than it names.
    """

    def visit(keys: tuple[Any, ...], leaf: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        if not isinstance(keys[-1], jax.tree_util.GetAttrKey):
            raise LayoutError(f"{path} lies in a container; make each array a field of a module")
        owner: Any = module
        for key in keys[:-1]:
            owner = (
                getattr(owner, key.name)
                if isinstance(key, jax.tree_util.GetAttrKey)
                else owner[key.key if isinstance(key, jax.tree_util.DictKey) else key.idx]
            )
        names = annotated_axes(type(owner), keys[-1].name)
        stacked = len(leaf.shape) - len(names)
        if stacked < 0:
            raise LayoutError(f"{path} has shape {leaf.shape} but names the axes {' '.join(names)}")
        return function(path, (None,) * stacked + names, leaf)

    return jax.tree_util.tree_map_with_path(visit, module)
