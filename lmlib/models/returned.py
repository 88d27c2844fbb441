"""Checks of the results that a part of a model returns.

An array is a sequence too. Without these checks, a part that returns one array instead of two
results would be unpacked along the batch.

Shapes: B batch, S sequence, E embed.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.models.part import Reports, class_name
from lmlib.parallel.axes import PartError

_MEANINGS = {
    "y_BSE": "an array like its input",
    "cache": "the new cache, None if it was given none",
    "reports": "a lmlib.models.part.Reports, NO_REPORTS for none",
}


def checked(part: Any, returned: Any, x_BSE: Array, *others: str) -> Any:
    """`returned` of `part`: a tuple of an array that can be added to `x_BSE`, the residual stream,
    and of `others`, each "cache" or "reports".

    Raises:
      PartError: if it is anything else, naming the part's class.
    """
    expected = ("y_BSE", *others)
    if type(returned) is not tuple or len(returned) != len(expected):
        meanings = "; ".join(f"{name}: {_MEANINGS[name]}" for name in expected)
        raise PartError(
            f"{class_name(part)} must return a tuple ({', '.join(expected)}), got "
            f"{_text(returned)} ({meanings})"
        )
    check_like(part, returned[0], x_BSE)
    if "reports" in others:
        _check_reports(part, returned[expected.index("reports")])
    return returned


def check_like(part: Any, y_BSE: Any, x_BSE: Array) -> None:
    """Raises PartError if `y_BSE` of `part` has another shape or dtype than `x_BSE`, or cannot be
    added to it as it lies. What broadcasts to it would be added without an error."""
    shape, dtype = getattr(y_BSE, "shape", None), getattr(y_BSE, "dtype", None)
    if (shape, dtype) != (x_BSE.shape, x_BSE.dtype):
        raise PartError(
            f"{class_name(part)} must return an array of the shape and dtype of its input, "
            f"{_text(x_BSE)}, got {_text(y_BSE)}"
        )
    try:
        jax.eval_shape(jnp.add, x_BSE, y_BSE)
    except Exception as error:  # shapes and dtypes agree: JAX adds no arrays that lie otherwise
        raise PartError(
            f"{class_name(part)} must return an array that lies as the residual stream does, "
            f"{jax.typeof(x_BSE)}, got {jax.typeof(y_BSE)}; give the last product "
            "`out_sharding=spec(context.compute.residual)`, or return "
            "`reshard(y_BSE, context.compute.residual)`, both of lmlib.parallel.layout"
        ) from error


def check_scalars(part: Any, what: str, values: Any) -> None:
    """Raises PartError if `values`, which `part` gives as `what`, is no mapping of scalars. JAX
    would average the elements of an array together with the layers."""
    if not isinstance(values, Mapping):
        raise PartError(
            f"{class_name(part)} must give {what} as a mapping of names, got {_text(values)}"
        )
    for name, value in values.items():
        if getattr(value, "shape", None) != ():
            raise PartError(
                f"{class_name(part)} must give a JAX scalar as {what}[{name!r}], got "
                f"{_text(value)}; `context.total` sums over the positions that count"
            )


def _check_reports(part: Any, reports: Any) -> None:
    if not isinstance(reports, Reports):
        raise PartError(
            f"{class_name(part)} must return reports, a lmlib.models.part.Reports (NO_REPORTS for "
            f"none), got {_text(reports)}"
        )
    check_scalars(part, "losses", reports.losses)
    check_scalars(part, "statistics", reports.statistics)


def _text(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{[*value.shape]}"
    if isinstance(value, tuple) and type(value) is tuple:
        return f"a tuple of {len(value)}: {', '.join(map(_text, value))}"
    return repr(value) if value is None else f"a {type(value).__name__}"
