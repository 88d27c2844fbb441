"""The short causal convolution of recurrent layers: a filter of a few tokens for each channel.

Shapes: B batch, S sequence, W width.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.models.forward_context import ForwardContext


def causal_convolution(
    x_BS: Float[Array, "b s ..."],
    filter_W: Float[Array, "... width"],
    context: ForwardContext,
    window_BW: Float[Array, "b before ..."] | None = None,
) -> tuple[Float[Array, "b s ..."], Float[Array, "b before ..."] | None]:
    """Returns Σ_j filter[W - 1 - j] · x[t - j] over the tokens of the same document.

    Also returns the new window, if there is one.

    Args:
      x_BS: any further axes are channels, and `filter_W` has the same ones, then its width W.
      window_BW: the W - 1 tokens before the first one, in generation; zeros at first.
    """
    width, S = filter_W.shape[-1], x_BS.shape[1]
    segments = context.segment_ids_BS
    after = window_BW
    if window_BW is None:
        before = jnp.zeros((x_BS.shape[0], width - 1, *x_BS.shape[2:]), x_BS.dtype)
    else:
        before = window_BW.astype(x_BS.dtype)
    whole = jnp.concatenate((before, x_BS), axis=1)
    if window_BW is not None:
        counted_B = jnp.sum(context.positions_BS >= 0, axis=1)
        at = counted_B[:, None] + jnp.arange(width - 1)
        at = at.reshape(*at.shape, *(1,) * (x_BS.ndim - 2))
        after = jnp.take_along_axis(whole, at, axis=1).astype(window_BW.dtype)
    total = x_BS * filter_W[..., -1]
    for j in range(1, width):
        earlier = whole[:, width - 1 - j : width - 1 - j + S]
        if segments is not None:
            shifted = jnp.pad(segments, ((0, 0), (j, 0)), mode="edge")[:, :S]
            same = (segments == shifted).reshape(*segments.shape, *(1,) * (x_BS.ndim - 2))
            earlier = jnp.where(same, earlier, 0)
        total += earlier * filter_W[..., width - 1 - j]
    return total, after
