"""The linear recurrence chunk by chunk, on one device: products of matrices within chunks, and a
scan over their states (arXiv:2412.06464, §3.3; arXiv:2405.21060, §6).

Shapes: B batch, S sequence, N chunks, L tokens of a chunk, G kv_heads, R heads of each, K key_dim,
V value_dim, D 1 or K: decays of a head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lmlib.models.recurrent.triangles import Sums, decayed_products, unit_inverse
from lmlib.parallel.collectives import platform

# Tokens of a device whose chunks are computed at once; the backward pass recomputes them.
_SPAN = 4_096


class Tokens(NamedTuple):
    """Tokens in the order of the text. Decays and rates are in float32 or wider."""

    q_BSGK: Float[Array, "b s g k"]
    k_BSGK: Float[Array, "b s g k"]
    v_BSGRV: Float[Array, "b s g r v"]
    log_decay_BSGRD: Float[Array, "b s g r d"]  # R is 1 if D is not
    beta_BSGR: Float[Array, "b s g r"] | None
    segments_BS: Int[Array, "b s"]


class Chunks(NamedTuple):
    """The coefficients of chunks. See `step` and `outputs`."""

    q_NBGLK: Array
    k_NBGLK: Array
    written_NBGLK: Array  # keys, with their decay until the end of the chunk if it is per channel
    v_NBGLRV: Array
    read_NBGLR: Array  # share of the state before the chunk that a token reads
    left_NBGLR: Array  # share of a token's value in the state after the chunk
    kept_NBGKR: Array  # share of the state before the chunk in the one after it; K or 1
    pairs_NBGRLL: Array  # weight of an earlier token's value in the output
    solved_NBGRLL: Array | None  # (I + A)^-1 diag(beta) of the delta rule


def one_token(tokens: Tokens, state_BGKRV: Array) -> tuple[Array, Array]:
    """The output of one token and the state after it, by the definition."""
    q_BGK, k_BGK, v_BGRV, log_decay_BGRD = (x[:, 0].astype(state_BGKRV.dtype) for x in tokens[:4])
    state_BGKRV *= jnp.exp(log_decay_BGRD).swapaxes(2, 3)[..., None]
    if tokens.beta_BSGR is not None:
        known_BGRV = jnp.einsum("bgk,bgkrv->bgrv", k_BGK, state_BGKRV)
        v_BGRV = tokens.beta_BSGR[:, 0, ..., None] * (v_BGRV - known_BGRV)
    state_BGKRV += k_BGK[..., None, None] * v_BGRV[:, :, None]
    y_BGRV = jnp.einsum("bgk,bgkrv->bgrv", q_BGK, state_BGKRV)
    return y_BGRV[:, None].astype(tokens.v_BSGRV.dtype), state_BGKRV


def scanned(
    tokens: Tokens, before_B: Int[Array, "b"], state_BGKRV: Float[Array, "b g k r v"], chunk: int
) -> tuple[Float[Array, "b s g r v"], Float[Array, "b g k r v"]]:
    """The outputs, and the state after the tokens; `before_B` is the segment before them."""
    if platform() == "cuda":
        from lmlib.models.recurrent import triton_chunks  # needs Pallas's part for GPUs

        if triton_chunks.fits(tokens):
            return triton_chunks.scanned(tokens, before_B, state_BGKRV, chunk)
    B, S = tokens.segments_BS.shape
    length = 1 << (min(chunk, S) - 1).bit_length()
    chunks = -(-S // length)
    span = min(max(_SPAN // (B * length), 1), chunks)
    spans = -(-chunks // span)
    tokens = padded(tokens, spans * span * length - S)
    before_BS = jnp.concatenate((before_B[:, None], tokens.segments_BS[:, :-1]), axis=1)

    def of_span(state_BGKRV: Array, span: tuple[Tokens, Array]) -> tuple[Array, Array]:
        chunks = _in_chunks(*span, length)
        end_BGKRV, (states, values) = jax.lax.scan(_step, state_BGKRV, chunks)
        return end_BGKRV, _outputs(chunks, states, values)

    if spans == 1:
        end_BGKRV, y_BSGRV = of_span(state_BGKRV, (tokens, before_BS))
    else:
        each = jax.tree.map(lambda x: _split(x, span * length), (tokens, before_BS))
        recomputed = jax.checkpoint(of_span, prevent_cse=False)
        end_BGKRV, y = jax.lax.scan(recomputed, state_BGKRV, each)
        y_BSGRV = jnp.moveaxis(y, 0, 1).reshape(B, -1, *y.shape[3:])
    return y_BSGRV[:, :S], end_BGKRV


def padded(tokens: Tokens, tail: int) -> Tokens:
    """`tokens` and `tail` more, which change no state."""

    def longer(x_BS: Array, mode: str = "constant") -> Array:
        return jnp.pad(x_BS, ((0, 0), (0, tail), *((0, 0),) * (x_BS.ndim - 2)), mode)

    if not tail:
        return tokens
    segments_BS = longer(tokens.segments_BS, "edge")
    return jax.tree.map(longer, tokens)._replace(segments_BS=segments_BS)


def affine_map(tokens: Tokens, before_B: Int[Array, "b"], chunk: int) -> tuple[Array, Array]:
    """Returns A and b of the state after the tokens, `applied(A, b, state before them)`."""
    B, _, G, R, V = tokens.v_BSGRV.shape
    K, wide = tokens.k_BSGK.shape[-1], tokens.log_decay_BSGRD.dtype
    zeros_BGKRV = jnp.zeros((B, G, K, R, V), wide)
    if tokens.beta_BSGR is None:
        end_BGKRV = scanned(tokens, before_B, zeros_BGKRV, chunk)[1]
        total_BGDR = jnp.exp(jnp.sum(tokens.log_decay_BSGRD, axis=1)).swapaxes(2, 3)
        continues_B = tokens.segments_BS[:, -1] == before_B
        return jnp.where(continues_B[:, None, None, None], total_BGDR, 0), end_BGKRV
    # The identity's columns follow the state's.
    identity_BGKRK = jnp.broadcast_to(jnp.eye(K, dtype=wide)[:, None], (B, G, K, R, K))
    start = jnp.concatenate((zeros_BGKRV, identity_BGKRK), axis=-1)
    nothing = jnp.zeros((*tokens.v_BSGRV.shape[:-1], K), tokens.v_BSGRV.dtype)
    tokens = tokens._replace(v_BSGRV=jnp.concatenate((tokens.v_BSGRV, nothing), axis=-1))
    end = scanned(tokens, before_B, start, chunk)[1]
    return end[..., V:], end[..., :V]


def applied(factor: Array, added_BGKRV: Array, state_BGKRV: Array) -> Float[Array, "b g k r v"]:
    """A state + b, where A is a factor of each row or, with the delta rule, a matrix."""
    if factor.ndim == 4:
        return factor[..., None] * state_BGKRV + added_BGKRV
    exact = jax.lax.Precision.HIGHEST
    moved = jnp.einsum("bgkrj,bgjrv->bgkrv", factor, state_BGKRV, precision=exact)
    return moved + added_BGKRV


def _split(x_BS: Array, length: int) -> Array:
    """The tokens of each chunk or span, behind a leading axis of these."""
    return jnp.moveaxis(x_BS.reshape(x_BS.shape[0], -1, length, *x_BS.shape[2:]), 1, 0)


def _in_chunks(tokens: Tokens, before_BS: Int[Array, "b s"], length: int) -> Chunks:
    """The coefficients of all chunks of `length` tokens."""
    each, before_NBL = jax.tree.map(lambda x: _split(x, length), (tokens, before_BS))
    wide, narrow = each.log_decay_BSGRD.dtype, each.v_BSGRV.dtype
    q_NBGLK, k_NBGLK = (jnp.moveaxis(x, 3, 2) for x in (each.q_BSGK, each.k_BSGK))
    v_NBGLRV = jnp.moveaxis(each.v_BSGRV, 3, 2)
    segments_NBL, before_NB1 = each.segments_BS, before_NBL[..., :1]
    same_NBLL = segments_NBL[..., :, None] == segments_NBL[..., None, :]
    read_NBL, left_NBL = segments_NBL == before_NB1, same_NBLL[..., -1, :]
    kept_NB = before_NB1[..., 0] == segments_NBL[..., -1]
    same_NBGRLL, below_LL = same_NBLL[:, :, None, None], jnp.tri(length, k=-1, dtype=bool)
    diagonal_LL = jnp.eye(length, dtype=wide)
    if each.log_decay_BSGRD.shape[-1] == 1:
        log_decay_NBGRL = jnp.moveaxis(each.log_decay_BSGRD[..., 0], 2, -1)
        sums = Sums.along(log_decay_NBGRL, -1)
        differences = sums.at(..., slice(None), None).since(sums.at(..., None, slice(None)))
        decay_NBGRLL = jnp.exp(jnp.where(below_LL & same_NBGRLL, differences, -jnp.inf))
        heads = v_NBGLRV.shape[4]
        query_pairs, key_pairs = (
            _for_heads(heads, _product("nbglk,nbgmk->nbglm", x, k_NBGLK))
            for x in (q_NBGLK, k_NBGLK)
        )
        # A token does not decay itself: its factor is exactly 1, not a rounded difference.
        pairs_NBGRLL = query_pairs * (decay_NBGRLL + diagonal_LL)
        lower_NBGRLL = key_pairs * decay_NBGRLL
        from_start = jnp.exp(sums.total()).swapaxes(-1, -2)
        to_end = jnp.exp(sums.at(..., slice(-1, None)).since(sums)).swapaxes(-1, -2)
        read_NBGLR = jnp.where(read_NBL[:, :, None, :, None], from_start, 0)
        left_NBGLR = jnp.where(left_NBL[:, :, None, :, None], to_end, 0)
        kept_NBGKR = jnp.where(kept_NB[:, :, None, None, None], from_start[..., -1:, :], 0)
        written_NBGLK = k_NBGLK
    else:
        log_decay_NBGLK = jnp.moveaxis(each.log_decay_BSGRD[..., 0, :], 3, 2)
        sums = Sums.along(log_decay_NBGLK, -2)
        pairs, lower = decayed_products((q_NBGLK, k_NBGLK), k_NBGLK, sums, narrow)
        own_NBGL = jnp.sum(q_NBGLK.astype(wide) * k_NBGLK, axis=-1)
        pairs_NBGRLL = (pairs + own_NBGL[..., None] * diagonal_LL)[:, :, :, None]
        pairs_NBGRLL = jnp.where(same_NBGRLL, pairs_NBGRLL, 0)
        lower_NBGRLL = jnp.where(same_NBGRLL, lower[:, :, :, None], 0)
        from_start = jnp.exp(sums.total())
        written_NBGLK = k_NBGLK * jnp.exp(sums.at(..., slice(-1, None), slice(None)).since(sums))
        q_NBGLK, k_NBGLK = q_NBGLK * from_start, k_NBGLK * from_start
        read_NBGLR = read_NBL[:, :, None, :, None].astype(wide)
        left_NBGLR = left_NBL[:, :, None, :, None].astype(wide)
        kept_NBGKR = jnp.where(kept_NB[:, :, None, None, None], from_start[..., -1, :, None], 0)
    solved_NBGRLL = None
    if each.beta_BSGR is not None:
        beta_NBGRL = jnp.moveaxis(each.beta_BSGR, 2, -1)
        inverse_NBGRLL = unit_inverse(lower_NBGRLL * beta_NBGRL[..., None])
        solved_NBGRLL = inverse_NBGRLL * beta_NBGRL[..., None, :]
    return Chunks(
        q_NBGLK, k_NBGLK, written_NBGLK, v_NBGLRV, read_NBGLR, left_NBGLR, kept_NBGKR,
        pairs_NBGRLL, solved_NBGRLL,
    )  # fmt: skip


def _step(state_BGKRV: Array, chunk: Chunks) -> tuple[Array, tuple[Array, Array]]:
    """The state after a chunk; also returns the state before it, and the values written."""
    narrow = chunk.v_NBGLRV.dtype
    if chunk.solved_NBGRLL is None:
        values_BGLRV = chunk.v_NBGLRV
    else:
        known = _product("bglk,bgkrv->bglrv", chunk.k_NBGLK, state_BGKRV, narrow)
        new_BGLRV = chunk.v_NBGLRV - chunk.read_NBGLR[..., None] * known
        values_BGLRV = _product("bgrlm,bgmrv->bglrv", chunk.solved_NBGRLL, new_BGLRV, narrow)
    left_BGLRV = chunk.left_NBGLR[..., None] * values_BGLRV
    written = _product("bglk,bglrv->bgkrv", chunk.written_NBGLK, left_BGLRV, narrow)
    return chunk.kept_NBGKR[..., None] * state_BGKRV + written, (state_BGKRV, values_BGLRV)


def _outputs(chunks: Chunks, states: Array, values: Array) -> Float[Array, "b s g r v"]:
    narrow = chunks.v_NBGLRV.dtype
    read = _product("nbglk,nbgkrv->nbglrv", chunks.q_NBGLK, states, narrow)
    y = chunks.read_NBGLR[..., None] * read
    y = y + _product("nbgrlm,nbgmrv->nbglrv", chunks.pairs_NBGRLL, values, narrow)
    y_BNLGRV = jnp.transpose(y, (1, 0, 3, 2, 4, 5))
    return y_BNLGRV.reshape(y.shape[1], -1, *y_BNLGRV.shape[3:]).astype(narrow)


def _product(subscripts: str, a: Array, b: Array, dtype: jnp.dtype | None = None) -> Array:
    """A product in `dtype`, summed in float32 or wider."""
    dtype = a.dtype if dtype is None else dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    return jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), preferred_element_type=wide)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _for_heads(heads: int, x_NBGLL: Array) -> Float[Array, "n b g r l l"]:
    """The same matrix for each head of a group."""
    return jnp.broadcast_to(x_NBGLL[:, :, :, None], (*x_NBGLL.shape[:3], heads, *x_NBGLL.shape[3:]))


def _over_heads(heads: int, _: None, d_NBGRLL: Array) -> tuple[Array]:
    """The sum of the gradients, by halves: XLA's CPU backend is slow to sum over an axis inside."""
    while (R := d_NBGRLL.shape[3]) > 1:
        first, second, odd = jnp.split(d_NBGRLL, (R // 2, R // 2 * 2), axis=3)
        d_NBGRLL = jnp.concatenate((first + second, odd), axis=3)
    return (d_NBGRLL[:, :, :, 0],)


_for_heads.defvjp(lambda heads, x: (_for_heads(heads, x), None), _over_heads)
