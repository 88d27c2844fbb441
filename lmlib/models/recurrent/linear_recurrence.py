"""The linear recurrence that Gated DeltaNet, Mamba-2 and Kimi Delta Attention share.

Shapes: B batch, S sequence, G kv_heads, H heads, K key_dim, V value_dim.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.models.forward_context import ForwardContext


def linear_recurrence(
    q_BSGK: Float[Array, "b s kv_heads key_dim"],
    k_BSGK: Float[Array, "b s kv_heads key_dim"],
    v_BSHV: Float[Array, "b s heads value_dim"],
    log_decay: Float[Array, "b s heads"] | Float[Array, "b s heads key_dim"],
    beta_BSH: Float[Array, "b s heads"] | None,
    context: ForwardContext,
    state_BHKV: Float[Array, "b heads key_dim value_dim"] | None = None,
) -> tuple[Float[Array, "b s heads value_dim"], Float[Array, "b heads key_dim value_dim"]]:
    """Returns y_t = q_tᵀ S_t for each token, and the state after the last one, in float32.

    S_t = a_t S_{t-1} + k_t v_tᵀ, or with the delta rule, if there are rates `beta`:
    S_t = a_t S_{t-1} + β_t k_t (v_t - k_tᵀ a_t S_{t-1})ᵀ (arXiv:2412.06464, eq. 10), where
    a_t = exp(log_decay) is a factor of each head, or of each key channel. The state is zero at the
    start of each document. Padding, at negative positions, changes no state.

    Args:
      q_BSGK, k_BSGK: H / G adjacent heads share a query and a key.
      state_BHKV: the state before the first token, in generation; `None`: zeros.
    """
    B, S, H, V = v_BSHV.shape
    G, K = k_BSGK.shape[2:]
    q, k = (jnp.repeat(x, H // G, axis=2).astype(jnp.float32) for x in (q_BSGK, k_BSGK))
    v = v_BSHV.astype(jnp.float32)
    a = jnp.exp(log_decay.astype(jnp.float32))
    a = a[..., None] if a.ndim == 3 else a
    a = jnp.broadcast_to(a, (B, S, H, K))
    segments = context.segment_ids_BS
    if segments is None:
        segments = jnp.zeros((B, S), jnp.int32)
    if state_BHKV is None:
        state_BHKV, previous = jnp.zeros((B, H, K, V), jnp.float32), segments[:, :1] * 0 - 1
    else:
        previous = segments[:, :1]
    goes_on = segments == jnp.concatenate((previous, segments[:, :-1]), axis=1)
    counts = context.positions_BS >= 0

    def step(state, token):
        q, k, v, a, beta, goes_on, counts = token
        new = jnp.where(goes_on[:, None, None, None], a[..., None] * state, 0)
        if beta is None:
            written = v
        else:
            written = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, new))
        new = new + k[..., None] * written[..., None, :]
        state = jnp.where(counts[:, None, None, None], new, state)
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    beta = None if beta_BSH is None else beta_BSH.astype(jnp.float32)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, a, beta, goes_on, counts))
    state_BHKV, y_SBHV = jax.lax.scan(step, state_BHKV, tokens)
    return jnp.moveaxis(y_SBHV, 0, 1).astype(v_BSHV.dtype), state_BHKV
