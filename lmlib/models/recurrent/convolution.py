"""The short causal convolution of recurrent layers: a filter of a few tokens for each channel.

Shapes: B batch, S sequence, W width, M pieces of a row on a device, C on all devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Shaped

from lmlib.models.forward_context import ForwardContext
from lmlib.parallel.collectives import all_gather, axis_index, devices_along, shard_map
from lmlib.parallel.layout import mesh_axes_for, partition
from lmlib.row_order import pieces_of_devices


def causal_convolution(
    x_BS: Float[Array, "b s ..."],
    filter_W: Float[Array, "... width"],
    context: ForwardContext,
    window_BW: Float[Array, "b before ..."] | None = None,
) -> tuple[Float[Array, "b s ..."], Float[Array, "b before ..."] | None]:
    """Returns Σ_j filter[W - 1 - j] · x[t - j] over the tokens of the same document.

    Also returns the new window, if there is one. Devices that share a row send the last W - 1
    tokens of each of its pieces. Raises ValueError if a piece is shorter.

    Args:
      x_BS: any further axes are channels, and `filter_W` has the same ones, then its width W.
      window_BW: the W - 1 tokens before the first one, in generation; zeros at first.
    """
    before = filter_W.shape[-1] - 1
    earlier = earlier_tokens(x_BS, before, context, window_BW)
    wide = jnp.promote_types(x_BS.dtype, jnp.float32)
    total = x_BS * filter_W[..., -1].astype(wide)
    for j, x_before_BS in enumerate(earlier, start=1):
        total += x_before_BS * filter_W[..., before - j].astype(wide)
    return total.astype(x_BS.dtype), moved_window(window_BW, x_BS, context)


def earlier_tokens(
    x_BS: Shaped[Array, "b s ..."],
    before: int,
    context: ForwardContext,
    window_BW: Shaped[Array, "b before ..."] | None = None,
) -> tuple[Shaped[Array, "b s ..."], ...]:
    """The values 1, 2, … `before` tokens earlier in the same document; zeros where it has none.

    The arguments, the exchange between devices and the error are as in `causal_convolution`.
    """
    layout, rows = PartitionSpec(), PartitionSpec()
    if not jax.sharding.get_abstract_mesh().empty:
        rows = partition("batch seq")
        layout = PartitionSpec(*rows, *jax.typeof(x_BS).sharding.spec.partitions[2:])
    found: tuple[Array, ...] = shard_map(
        functools.partial(_earlier, before=before, order=context.order),
        inputs=(layout, rows, PartitionSpec(rows[0], None, *layout[2:]) if rows else rows),
        outputs=(layout,) * before,
    )(x_BS, context.segment_ids_BS, window_BW)
    return found


def moved_window(
    window_BW: Shaped[Array, "b before ..."] | None,
    x_BS: Shaped[Array, "b s ..."],
    context: ForwardContext,
) -> Shaped[Array, "b before ..."] | None:
    """The window after the tokens of a call; `None` if there was none."""
    if window_BW is None:
        return None
    before = window_BW.shape[1]
    counted_B = jnp.sum(context.positions_BS >= 0, axis=1)
    at = (counted_B[:, None] + jnp.arange(before)).reshape(-1, before, *(1,) * (x_BS.ndim - 2))
    whole = jnp.concatenate((window_BW, x_BS.astype(window_BW.dtype)), axis=1)
    return jnp.take_along_axis(whole, at, axis=1)


def _earlier(
    x_BS: Array, segments_BS: Array | None, window_BW: Array | None, before: int, order: str
) -> tuple[Array, ...]:
    """The tokens 1, 2, … `before` places before this device's ones; zeros in other documents."""
    mesh_axes = mesh_axes_for("seq")
    pieces_CM = pieces_of_devices(devices_along(mesh_axes), order)
    M, (B, S) = pieces_CM.shape[1], x_BS.shape[:2]
    P = S // M
    if pieces_CM.size > 1 and before > P:
        raise ValueError(
            f"a convolution over {before + 1} tokens needs pieces of at least {before}, and "
            f"context={len(pieces_CM)} cuts rows into pieces of {P}; use longer rows, or fewer "
            "devices along context"
        )

    def with_those_before(x_BS: Array, first_BW: Array) -> Array:
        """The tokens of each piece, behind those before it."""
        x_BMP = x_BS.reshape(B, M, P, *x_BS.shape[2:])
        before_BM = first_BW[:, None]
        if pieces_CM.size > 1:
            own_M = jnp.asarray(pieces_CM)[axis_index(mesh_axes)]
            ends_BC = all_gather(x_BMP[:, :, P - before :], mesh_axes, axis=1)
            ends_BC = ends_BC[:, np.argsort(pieces_CM.reshape(-1))]
            is_first_M = (own_M == 0).reshape(-1, *(1,) * (x_BS.ndim - 1))
            before_BM = jnp.where(is_first_M, before_BM, ends_BC[:, own_M - 1])
        return jnp.concatenate((before_BM, x_BMP), axis=2)

    def shifted(x_BMP: Array, j: int) -> Array:
        return x_BMP[:, :, before - j : before - j + P].reshape(B, S, *x_BMP.shape[3:])

    if window_BW is None:
        window_BW = jnp.zeros((B, before, *x_BS.shape[2:]), x_BS.dtype)
    whole = with_those_before(x_BS, window_BW.astype(x_BS.dtype))
    earlier = [shifted(whole, j) for j in range(1, before + 1)]
    if segments_BS is not None:
        of_first = jnp.repeat(segments_BS[:, :1], before, axis=1)
        segments = with_those_before(segments_BS, of_first)
        for j in range(1, before + 1):
            same_BS = segments_BS == shifted(segments, j)
            same_BS = same_BS.reshape(B, S, *(1,) * (x_BS.ndim - 2))
            earlier[j - 1] = jnp.where(same_BS, earlier[j - 1], 0)
    return tuple(earlier)
