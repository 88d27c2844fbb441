"""Tensors with values that cannot be weights: no floats, infinite or no number."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from lmlib.hf.folder import FolderError
from lmlib.hf.tensor_files import DTYPES, Stored

_AT_ONCE = 1 << 22  # values


def check_finite(name: str, source: Stored, values: ArrayLike) -> None:
    """Checks a tensor that was read. Values are looked at where they lie; the file is read again
    only to tell what is wrong with it. All processes find the same.

    Args:
      name: in the folder.
      source: where it was read from.
      values: all of it, wherever they lie.

    Raises:
      FolderError: naming the tensor, how many values are not finite, and the first of them; or its
        dtype, if that is none of floats.
    """
    if source.dtype not in DTYPES.values():
        raise FolderError(
            f"{source.file}: {name} has values of {source.dtype}, but weights are floats: "
            f"{', '.join(DTYPES)}"
        )
    if np.isfinite(values).all() if isinstance(values, np.ndarray) else _all_finite(values):
        return
    count, first, value = 0, 0, np.float32(0)
    for start in range(0, source.size, _AT_ONCE):
        with np.errstate(over="ignore"):  # what float32 cannot hold
            read = source.read(start, min(start + _AT_ONCE, source.size)).astype(np.float32)
        (places,) = np.nonzero(~np.isfinite(read))
        if len(places) and not count:
            first, value = start + int(places[0]), read[places[0]]
        count += len(places)
    index = tuple(int(i) for i in np.unravel_index(first, source.shape))
    raise FolderError(
        f"{source.file}: {count:,} of {source.size:,} values of {name} are not finite in float32, "
        f"the first is {value} at {index}: whatever is computed with them is no number"
    )


@jax.jit
def _all_finite(values: jax.Array) -> jax.Array:
    return jnp.isfinite(values).all()
