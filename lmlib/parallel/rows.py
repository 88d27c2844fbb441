"""Rows that `context` splits, gathered for code that needs them whole.

Shapes: B batch, S sequence.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lmlib.parallel.collectives import devices_along
from lmlib.parallel.layout import mesh_axes_for, reshard
from lmlib.row_order import places


def gathered_rows(x_BS: Array, order: str) -> Array:
    """Gathers rows split in `order` along `context`, in the order of the text.

    This is an all-gather over `context`; the result is whole on each device.
    """
    devices = devices_along(mesh_axes_for("seq"))
    if devices == 1:
        return x_BS
    whole_BS = reshard(x_BS, ("batch", None))
    return jnp.take(whole_BS, np.argsort(places(x_BS.shape[1], devices, order)), axis=1)


def split_rows(x_BS: Array, order: str) -> Array:
    """The inverse of `gathered_rows`; nothing is sent."""
    devices = devices_along(mesh_axes_for("seq"))
    if devices == 1:
        return x_BS
    return reshard(jnp.take(x_BS, places(x_BS.shape[1], devices, order), axis=1), "batch seq")
