"""Measures how rounding to a file's dtype changes weights.

Shapes: L repetitions of a stacked weight.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lmlib.hf.names import Placed
from lmlib.parallel.axes import Weight, map_weights


class Rounding(NamedTuple):
    """The difference between a file's values and the weights.

    Attributes:
      dtype: dtype of the file.
      largest: the largest relative change, |rounded - value| / |value|; 0 if all values are exact.
      tensor: the tensor with the largest change; `None` if all values are exact.
    """

    dtype: str
    largest: float
    tensor: str | None

    def __str__(self) -> str:
        if self.tensor is None:
            return f"{self.dtype}, which keeps every value"
        return f"{self.dtype}, which rounds by up to {self.largest:.2%} (in {self.tensor})"


def rounding(model: Any, wanted: Sequence[Placed], dtype: str) -> Rounding:
    """Measures how weights of `model` change in the tensors `wanted` of `dtype`.

    Raises:
      ValueError: if a value exceeds the range of `dtype`; names its tensor.
    """
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    apart = {piece.path: tuple(axis for axis, _ in piece.fixed)
             for tensor in wanted if tensor.dtype_in(dtype) == dtype
             for piece in tensor.pieces}  # fmt: skip

    def measure(weight: Weight, array: jax.Array) -> None:
        narrower = jnp.promote_types(array.dtype, dtype) != jnp.dtype(dtype)
        if narrower and weight.path in apart:
            measured = _measured(array, dtype, weight.stacked > 0, apart[weight.path])
            found[weight.path] = jax.device_get(measured)

    map_weights(measure, model)
    worst = Rounding(dtype, 0.0, None)
    for tensor in wanted:
        for piece in tensor.pieces:
            if piece.path not in found:
                continue
            at = piece.repetition or 0, *(index for _, index in piece.fixed)
            lost, change = (float(each[at]) for each in found[piece.path])
            if lost:
                raise _beyond(tensor.name, lost, dtype)
            if change > worst.largest:
                worst = Rounding(dtype, change, tensor.name)
    return worst


def in_dtype(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts `values` of the tensor `name` to `dtype`.

    Raises:
      ValueError: as `rounding`.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(jnp.dtype(dtype))
    lost = values[np.isfinite(values) & ~np.isfinite(rounded)]
    if lost.size:
        raise _beyond(name, float(lost[np.argmax(np.abs(lost))]), dtype)
    return rounded


def _beyond(name: str, value: float, dtype: str) -> ValueError:
    return ValueError(
        f"{name} holds {value:g}, which would become infinite in {dtype}, whose values end at "
        f"{float(jnp.finfo(dtype).max):g}: give bfloat16 or float32"
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _measured(
    array: Array, dtype: str, stacked: bool, apart: tuple[int, ...]
) -> tuple[Float[Array, "L ..."], Float[Array, "L ..."]]:
    """Finds overflowing values, and the largest relative change of the other values.

    Returns two arrays, with an entry for each repetition and each index along the axes `apart`: the
    value of largest magnitude that `dtype` makes infinite, or 0; and the largest relative change.
    """

    def of_one(array: Array) -> tuple[Array, Array]:
        wide = array.astype(jnp.float32)
        rounded = array.astype(dtype).astype(jnp.float32)
        over = tuple(axis for axis in range(array.ndim) if axis not in apart)
        is_lost = jnp.isfinite(wide) & ~jnp.isfinite(rounded)
        lost = jnp.where(is_lost, wide, 0)
        most, least = jnp.max(lost, over), jnp.min(lost, over)
        is_changed = jnp.isfinite(rounded) & (rounded != wide)
        change = jnp.abs(rounded - wide) / jnp.where(is_changed, jnp.abs(wide), 1)
        furthest = jnp.where(-least > most, least, most)
        return furthest, jnp.max(jnp.where(is_changed, change, 0), over)

    return jax.lax.map(of_one, array if stacked else array[None])
