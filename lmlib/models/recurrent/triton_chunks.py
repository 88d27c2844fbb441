"""The linear recurrence chunk by chunk on NVIDIA GPUs, in Pallas for Triton.

    recurrence_pairs      weights of pairs, and (I + A)^-1 of the delta rule, for each chunk
    recurrence_outputs    chunks in order: outputs, and the state before each chunk
    recurrence_states     chunks in reverse: gradients of values and of the state after each chunk
    recurrence_gradients  all other gradients, for each chunk

A program has one head of a row. The second and third kernels have a block of its values, and keep
their state in registers. States are float32; products have the dtype of the arrays, and are summed
in float32. See `lmlib.models.recurrent.chunks` for the meaning of coefficients.

Shapes: B batch, S sequence, N chunks, L tokens of a chunk, T tokens of a tile, G kv_heads, H heads,
R = H / G, K key_dim, V value_dim, W values of a block.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from lmlib.models.recurrent.chunks import Tokens, padded
from lmlib.models.recurrent.triangles import Sums
from lmlib.parallel.collectives import platform

Ref = Any  # Pallas's reference to an array in the GPU's memory
Places = Any  # a slice of tokens

_TILE = 16  # the minimum for a GPU's tensor cores
_WIDTH = 32  # values of a block
_LONGEST = 64  # tokens of a chunk
_LARGEST_KEY = 128
_DTYPES: tuple[DTypeLike, ...] = (jnp.bfloat16, jnp.float16)  # float32 exceeds the registers


def fits(tokens: Tokens) -> bool:
    """True if these kernels support the shapes."""
    by_heads, K = tokens.log_decay_BSGRD.shape[-1] == 1, tokens.k_BSGK.shape[-1]
    return by_heads and K <= _LARGEST_KEY and tokens.v_BSGRV.dtype in _DTYPES


def scanned(
    tokens: Tokens, before_B: Int[Array, "b"], state_BGKRV: Float[Array, "b g k r v"], chunk: int
) -> tuple[Float[Array, "b s g r v"], Float[Array, "b g k r v"]]:
    """See `lmlib.models.recurrent.chunks.scanned`. Without a GPU, Pallas interprets the kernels."""
    B, S, G, R, V = tokens.v_BSGRV.shape
    K, H = tokens.k_BSGK.shape[-1], G * R
    length = min(max(_filled(min(chunk, S)), _TILE), _LONGEST)
    tokens = padded(tokens, -S % length)
    before_BS = jnp.concatenate((before_B[:, None], tokens.segments_BS[:, :-1]), axis=1)
    log_decay_BSH = tokens.log_decay_BSGRD.reshape(B, -1, H)
    beta_BSH = None if tokens.beta_BSGR is None else tokens.beta_BSGR.reshape(B, -1, H)
    more_keys, more_values = _filled(K) - K, (_filled(V) if V < _WIDTH else V + -V % _WIDTH) - V
    more = (0, 0), (0, 0), (0, 0)
    arrays = Arrays(
        jnp.pad(tokens.q_BSGK, (*more, (0, more_keys))),
        jnp.pad(tokens.k_BSGK, (*more, (0, more_keys))),
        jnp.pad(tokens.v_BSGRV.reshape(B, -1, H, V), (*more, (0, more_values))),
        coefficients(log_decay_BSH, beta_BSH, tokens.segments_BS, before_BS, length),
    )
    start_BHKV = state_BGKRV.swapaxes(2, 3).reshape(B, H, K, V)
    start_BHKV = jnp.pad(start_BHKV, (*more[:2], (0, more_keys), (0, more_values)))
    y_BSHV, end_BHKV = in_order(length, arrays, start_BHKV)
    end_BGRKV = end_BHKV[:, :, :K, :V].reshape(B, G, R, K, V)
    return y_BSHV[:, :S, :, :V].reshape(B, S, G, R, V), end_BGRKV.swapaxes(2, 3)


def _filled(size: int) -> int:
    """The size of a tile: a power of two."""
    return max(_TILE, 1 << (size - 1).bit_length())


class Coefficients(NamedTuple):
    """Coefficients of tokens in their chunks; in kernels, refs to those of a head."""

    beta_BHS: Any  # `None` without the delta rule
    read_BHS: Any  # in the last token of a chunk: the share of the state that is kept
    left_BHS: Any
    whole_BHS: Any  # the two summands of the logarithm of the decay
    rest_BHS: Any
    segments_BS: Any


class Arrays(NamedTuple):
    """The tokens of rows, or refs to them in kernels."""

    q_BSGK: Any
    k_BSGK: Any
    v_BSHV: Any
    tokens: Coefficients
    pairs_BHSL: Any = None
    inverse_BHSL: Any = None  # of the delta rule


def coefficients(
    log_decay_BSH: Array, beta_BSH: Array | None, segments_BS: Array, before_BS: Array, length: int
) -> Coefficients:
    """Coefficients of chunks of `length` tokens; `before_BS`: the segment before each token."""
    B, S, H = log_decay_BSH.shape
    sums = Sums.along(log_decay_BSH.swapaxes(1, 2).reshape(B, H, -1, length), -1)
    segments_B1NL = segments_BS.reshape(B, 1, -1, length)
    before_B1N1 = before_BS[:, None, ::length, None]
    from_start, to_end = jnp.exp(sums.total()), jnp.exp(sums.at(..., slice(-1, None)).since(sums))
    read_BHNL = jnp.where(segments_B1NL == before_B1N1, from_start, 0)
    left_BHNL = jnp.where(segments_B1NL == segments_B1NL[..., -1:], to_end, 0)
    of_heads = read_BHNL, left_BHNL, sums.whole, sums.rest
    read_BHS, left_BHS, whole_BHS, rest_BHS = (x.reshape(B, H, S) for x in of_heads)
    beta_BHS = None if beta_BSH is None else beta_BSH.swapaxes(1, 2)
    return Coefficients(beta_BHS, read_BHS, left_BHS, whole_BHS, rest_BHS, segments_BS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_order(length: int, arrays: Arrays, start_BHKV: Array) -> tuple[Array, Array]:
    """The outputs of chunks of `length` tokens, and the state after the last one."""
    y_BSHV, end_BHKV = _outputs(length, _with_pairs(length, arrays), start_BHKV, saved=False)
    return y_BSHV, end_BHKV


def _forward(
    length: int, arrays: Arrays, start_BHKV: Array
) -> tuple[tuple[Array, Array], tuple[Arrays, Array]]:
    arrays = _with_pairs(length, arrays)
    y_BSHV, end_BHKV, states_BHNKV = _outputs(length, arrays, start_BHKV, saved=True)
    return (y_BSHV, end_BHKV), (arrays, states_BHNKV)


def _backward(
    length: int, saved: tuple[Arrays, Array], given: tuple[Array, Array]
) -> tuple[Arrays, Array]:
    arrays, states_BHNKV = saved
    d_y_BSHV, d_end_BHKV = given
    q_BSGK, _, v_BSHV, tokens, *_ = arrays
    specs = _Specs.of(length, arrays)
    solved_BSHV, d_states_BHNKV, d_start_BHKV = _call(
        _states_kernel, "recurrence_states", specs.grid,
        inputs=(specs.arrays, specs.state),
        outputs=((specs.value, v_BSHV), (specs.states, states_BHNKV), (specs.state, d_end_BHKV)),
    )(arrays._replace(v_BSHV=d_y_BSHV), d_end_BHKV)  # fmt: skip
    specs = _Specs.of(length, arrays, of_chunks=True)
    B, S, H, _ = v_BSHV.shape
    key = jax.ShapeDtypeStruct((B, S, H, q_BSGK.shape[-1]), q_BSGK.dtype)
    d_q_BSHK, d_k_BSHK, d_v_BSHV, *of_tokens = _call(
        _gradients_kernel, "recurrence_gradients", specs.grid,
        inputs=(specs.arrays, specs.states, specs.value, specs.value, specs.states),
        outputs=(
            (specs.own_key, key), (specs.own_key, key), (specs.value, v_BSHV),
            *((specs.number, tokens.rest_BHS) for _ in range(4)),
        ),
        warps=8,
    )(arrays, states_BHNKV, d_y_BSHV, solved_BSHV, d_states_BHNKV)  # fmt: skip
    d_beta, d_read, d_left, d_rest = of_tokens
    d_beta = None if tokens.beta_BHS is None else d_beta
    d_tokens = Coefficients(d_beta, d_read, d_left, jnp.zeros_like(d_rest), d_rest, None)
    d_q_BSGK, d_k_BSGK = (_over_heads(x, q_BSGK) for x in (d_q_BSHK, d_k_BSHK))
    return Arrays(d_q_BSGK, d_k_BSGK, d_v_BSHV, d_tokens), d_start_BHKV


in_order.defvjp(_forward, _backward)


def _over_heads(d_BSHK: Array, x_BSGK: Array) -> Array:
    """The sum over the heads of each key."""
    B, S, G, K = x_BSGK.shape
    return jnp.sum(d_BSHK.reshape(B, S, G, -1, K), axis=3)


def _with_pairs(length: int, arrays: Arrays) -> Arrays:
    """Adds the matrices of chunks, which have a row for each token."""
    B, S, H, _ = arrays.v_BSHV.shape
    specs = _Specs.of(length, arrays, of_chunks=True)
    matrix = jax.ShapeDtypeStruct((B, H, S, length), arrays.k_BSGK.dtype)
    has_inverse = arrays.tokens.beta_BHS is not None
    matrices = _call(
        functools.partial(_pairs_kernel, length=length), "recurrence_pairs", specs.grid,
        inputs=(specs.arrays,), outputs=((specs.matrix, matrix),) * (1 + has_inverse), warps=2,
    )(arrays)  # fmt: skip
    return Arrays(*arrays[:4], *matrices)


def _outputs(length: int, arrays: Arrays, start_BHKV: Array, saved: bool) -> tuple[Array, ...]:
    """The outputs, the state after the tokens, and if `saved` those before each chunk."""
    B, S, H, _ = arrays.v_BSHV.shape
    states = jax.ShapeDtypeStruct((B, H, S // length, *start_BHKV.shape[2:]), arrays.v_BSHV.dtype)
    specs = _Specs.of(length, arrays)
    outputs = (specs.value, arrays.v_BSHV), (specs.state, start_BHKV), (specs.states, states)
    return _call(
        functools.partial(_outputs_kernel, length=length), "recurrence_outputs", specs.grid,
        inputs=(specs.arrays, specs.state), outputs=outputs[: 2 + saved],
    )(arrays, start_BHKV)  # fmt: skip


class _Specs(NamedTuple):
    """The blocks of a program's arrays: whole rows of a head, and perhaps a part of its values."""

    grid: tuple[int, int, int]
    arrays: Arrays
    own_key: pl.BlockSpec
    value: pl.BlockSpec
    number: pl.BlockSpec
    matrix: pl.BlockSpec
    state: pl.BlockSpec
    states: pl.BlockSpec

    @classmethod
    def of(cls, length: int, arrays: Arrays, of_chunks: bool = False) -> "_Specs":
        """For each chunk all values, or for each block of values all chunks."""
        B, S, H, V = arrays.v_BSHV.shape
        G, K = arrays.q_BSGK.shape[2:]
        N, W = S // length, V if of_chunks else min(V, _WIDTH)

        def at(j: Array) -> Array | int:
            return 0 if of_chunks else j

        key = pl.BlockSpec((None, S, None, K), lambda j, h, b: (b, 0, h // (H // G), 0))
        value = pl.BlockSpec((None, S, None, W), lambda j, h, b: (b, 0, h, at(j)))
        number = pl.BlockSpec((None, None, S), lambda j, h, b: (b, h, 0))
        segments = pl.BlockSpec((None, S), lambda j, h, b: (b, 0))
        matrix = pl.BlockSpec((None, None, S, length), lambda j, h, b: (b, h, 0, 0))
        beta, *matrices = arrays.tokens.beta_BHS, arrays.pairs_BHSL, arrays.inverse_BHSL
        of_delta = None if beta is None else number
        tokens = Coefficients(of_delta, number, number, number, number, segments)
        return cls(
            (N if of_chunks else V // W, H, B),
            Arrays(key, key, value, tokens, *(x if x is None else matrix for x in matrices)),
            pl.BlockSpec((None, S, None, K), lambda j, h, b: (b, 0, h, 0)),
            value,
            number,
            matrix,
            pl.BlockSpec((None, None, K, W), lambda j, h, b: (b, h, 0, at(j))),
            pl.BlockSpec((None, None, N, K, W), lambda j, h, b: (b, h, 0, 0, at(j))),
        )


def _pairs_kernel(refs: Arrays, pairs_SL: Ref, *inverse_SL: Ref, length: int) -> None:
    """By blocks: [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]].

    Blocks on the diagonal are eliminated column by column. Powers of A would lose all digits where
    keys are equal.
    """
    first, count = pl.program_id(0) * length, length // _TILE
    rows = [pl.ds(first + i * _TILE, _TILE) for i in range(count)]
    row_TT, column_TT = _indices(_TILE)
    lower = {}
    for i, j in np.ndindex(count, count):
        pairs_TT = jnp.zeros((_TILE, _TILE), jnp.float32)
        if j <= i:
            k_KT, decay_TT = refs.k_BSGK[rows[j], :].T, _decay(refs.tokens, rows[i], rows[j])
            # A token's own decay is no difference: its factor is exactly 1.
            with_own_TT = jnp.where(row_TT == column_TT, 1.0, decay_TT) if i == j else decay_TT
            pairs_TT = _dot(refs.q_BSGK[rows[i], :], k_KT) * with_own_TT
            if inverse_SL:
                beta_T1 = refs.tokens.beta_BHS[rows[i]][:, None]
                lower[i, j] = _dot(refs.k_BSGK[rows[i], :], k_KT) * decay_TT * beta_T1
        pairs_SL[rows[i], pl.ds(j * _TILE, _TILE)] = pairs_TT.astype(pairs_SL.dtype)
    if not inverse_SL:
        return

    def eliminate(n: Array, inverses: list[Array]) -> list[Array]:
        columns = (jnp.where(column_TT == n, lower[i, i], 0) for i in range(count))
        return [
            inverse - jnp.sum(column, axis=1)[:, None]
            * jnp.sum(jnp.where(row_TT == n, inverse, 0), axis=0)[None]
            for inverse, column in zip(inverses, columns, strict=True)
        ]  # fmt: skip

    identity_TT = jnp.where(row_TT == column_TT, 1.0, 0.0)
    diagonal = jax.lax.fori_loop(0, _TILE - 1, eliminate, [identity_TT] * count)
    blocks = {(i, i): each for i, each in enumerate(diagonal)}
    for i, j in np.ndindex(count, count):
        if j < i:
            below_TT = jnp.zeros_like(identity_TT)
            for m in range(j, i):
                below_TT += _dot(lower[i, m], blocks[m, j])
            blocks[i, j] = -_dot(blocks[i, i], below_TT)
        block_TT = blocks.get((i, j), jnp.zeros_like(identity_TT))
        inverse_SL[0][rows[i], pl.ds(j * _TILE, _TILE)] = block_TT.astype(pairs_SL.dtype)


def _outputs_kernel(
    refs: Arrays, start_KW: Ref, y_SW: Ref, end_KW: Ref, *states_NKW: Ref, length: int
) -> None:
    dtype = y_SW.dtype

    def step(n: Array, state_KW: Array) -> Array:
        here = pl.ds(n * length, length)
        tokens = refs.tokens
        q_LK, k_LK, v_LW = refs.q_BSGK[here, :], refs.k_BSGK[here, :], refs.v_BSHV[here, :]
        read_L1 = tokens.read_BHS[here][:, None]
        state = state_KW.astype(dtype)
        for states in states_NKW:
            states[n, :, :] = state
        values_LW = _values(refs, here, k_LK, v_LW, state)[1]
        y_LW = _dot(refs.pairs_BHSL[here, :], values_LW.astype(dtype))
        y_LW += read_L1 * _dot(q_LK, state)
        y_SW[here, :] = y_LW.astype(dtype)
        left_LW = tokens.left_BHS[here][:, None] * values_LW
        return _kept(tokens, n, length) * state_KW + _dot(k_LK.T, left_LW.astype(dtype))

    chunks = y_SW.shape[0] // length
    end_KW[...] = jax.lax.fori_loop(0, chunks, step, start_KW[...])


def _states_kernel(
    refs: Arrays, d_end_KW: Ref, solved_SW: Ref, d_states_NKW: Ref, d_start_KW: Ref
) -> None:
    """The values of `refs` are the gradients of the outputs."""
    chunks = d_states_NKW.shape[0]
    length = solved_SW.shape[0] // chunks
    dtype, tokens = solved_SW.dtype, refs.tokens

    def step(i: Array, d_state_KW: Array) -> Array:
        n = chunks - 1 - i
        here = pl.ds(n * length, length)
        q_LK, k_LK, d_y_LW = refs.q_BSGK[here, :], refs.k_BSGK[here, :], refs.v_BSHV[here, :]
        d_state = d_state_KW.astype(dtype)
        d_states_NKW[n, :, :] = d_state
        d_values_LW = _dot(refs.pairs_BHSL[here, :].T, d_y_LW)
        d_values_LW += tokens.left_BHS[here][:, None] * _dot(k_LK, d_state)
        read_L1 = tokens.read_BHS[here][:, None]
        before_KW = _dot(q_LK.T, (read_L1 * d_y_LW).astype(dtype))
        if refs.inverse_BHSL is not None:
            d_values_LW = _dot(refs.inverse_BHSL[here, :].T, d_values_LW.astype(dtype))
            known_LW = read_L1 * tokens.beta_BHS[here][:, None] * d_values_LW
            before_KW -= _dot(k_LK.T, known_LW.astype(dtype))
        solved_SW[here, :] = d_values_LW.astype(dtype)
        return _kept(tokens, n, length) * d_state_KW + before_KW

    d_start_KW[...] = jax.lax.fori_loop(0, chunks, step, d_end_KW[...])


def _gradients_kernel(
    refs: Arrays, states_NKV: Ref, d_y_SV: Ref, solved_SV: Ref, d_states_NKV: Ref, d_q_SK: Ref,
    d_k_SK: Ref, d_v_SV: Ref, d_beta_S: Ref, d_read_S: Ref, d_left_S: Ref, d_rest_S: Ref,
) -> None:  # fmt: skip
    """`solved_SV` are the gradients of the values, times the transposed inverse."""
    n, (chunks, K, V) = pl.program_id(0), states_NKV.shape
    length = d_y_SV.shape[0] // chunks
    width, here = min(V, _WIDTH), pl.ds(n * length, length)
    dtype, tokens, delta = d_q_SK.dtype, refs.tokens, refs.inverse_BHSL is not None
    q_LK, k_LK = refs.q_BSGK[here, :], refs.k_BSGK[here, :]
    read_L, left_L = tokens.read_BHS[here], tokens.left_BHS[here]
    beta_L = tokens.beta_BHS[here] if delta else jnp.ones_like(read_L)

    def of_values(j: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        d_q, d_k, d_pairs, d_lower, d_beta, d_read, d_left, d_kept = sums
        some = pl.ds(j * width, width)
        state, d_state = states_NKV[n, :, some], d_states_NKV[n, :, some]
        v_LW, d_y_LW, solved_LW = refs.v_BSHV[here, some], d_y_SV[here, some], solved_SV[here, some]
        new_LW, values_LW = _values(refs, here, k_LK, v_LW, state)
        values_LW = values_LW.astype(dtype)
        d_v_SV[here, some] = (beta_L[:, None] * solved_LW).astype(dtype)
        d_pairs += _dot(d_y_LW, values_LW.T)
        of_queries_LK = _dot(d_y_LW, state.T)
        of_values_LK = _dot(values_LW, d_state.T)
        d_q += read_L[:, None] * of_queries_LK
        d_k += left_L[:, None] * of_values_LK
        d_read += jnp.sum(q_LK * of_queries_LK, axis=1)
        d_left += jnp.sum(k_LK * of_values_LK, axis=1)
        d_kept += jnp.sum(jnp.sum(state.astype(jnp.float32) * d_state, axis=1), axis=0)
        if delta:
            d_lower -= _dot(solved_LW, values_LW.T)
            known_LK = _dot(solved_LW, state.T)
            d_k -= (read_L * beta_L)[:, None] * known_LK
            d_read -= beta_L * jnp.sum(k_LK * known_LK, axis=1)
            d_beta += jnp.sum(solved_LW * new_LW, axis=1)
        return d_q, d_k, d_pairs, d_lower, d_beta, d_read, d_left, d_kept

    zeros_L, zeros_LL, zeros_LK = (
        jnp.zeros(shape, jnp.float32) for shape in ((length,), (length, length), (length, K))
    )
    sums = zeros_LK, zeros_LK, zeros_LL, zeros_LL, zeros_L, zeros_L, zeros_L, jnp.float32(0)
    sums = jax.lax.fori_loop(0, V // width, of_values, sums)
    d_q, d_k, d_pairs, d_lower, d_beta, d_read, d_left, d_kept = sums
    decay_LL, (row_LL, column_LL) = _decay(tokens, here, here), _indices(length)
    d_rest_LL = jnp.where(row_LL > column_LL, d_pairs * refs.pairs_BHSL[here, :], 0)
    d_pairs = (d_pairs * jnp.where(row_LL == column_LL, 1.0, decay_LL)).astype(dtype)
    d_q += _dot(d_pairs, k_LK)
    d_k += _dot(d_pairs.T, q_LK)
    if delta:
        d_lower *= decay_LL
        of_rates_LL = d_lower * _dot(k_LK, k_LK.T)
        d_beta += jnp.sum(of_rates_LL, axis=1)
        d_rest_LL += beta_L[:, None] * of_rates_LL
        d_lower = (beta_L[:, None] * d_lower).astype(dtype)
        d_k += _dot(d_lower, k_LK) + _dot(d_lower.T, k_LK)
    last_L = jnp.arange(length) == length - 1
    d_q_SK[here, :], d_k_SK[here, :] = d_q.astype(dtype), d_k.astype(dtype)
    d_beta_S[here], d_left_S[here] = d_beta, d_left
    d_read_S[here] = d_read + jnp.where(last_L, d_kept, 0)
    d_rest_S[here] = jnp.sum(d_rest_LL, axis=1) - jnp.sum(d_rest_LL, axis=0)


def _values(
    refs: Arrays, here: Places, k_LK: Array, v_LW: Array, state_KW: Array
) -> tuple[Array, Array]:
    """The values of a chunk without those known from the state before it, and those written."""
    if refs.inverse_BHSL is None:
        return v_LW, v_LW.astype(jnp.float32)
    new_LW = v_LW - refs.tokens.read_BHS[here][:, None] * _dot(k_LK, state_KW)
    rated_LW = refs.tokens.beta_BHS[here][:, None] * new_LW
    return new_LW, _dot(refs.inverse_BHSL[here, :], rated_LW.astype(v_LW.dtype))


def _decay(tokens: Coefficients, late: Places, early: Places) -> Array:
    """The decay from an early token, a column, to a late one, a row; otherwise zero, and in other
    documents."""

    def between(x_S: Ref) -> tuple[Array, Array]:
        return x_S[late][:, None], x_S[early][None, :]

    (whole, whole_before), (rest, rest_before) = between(tokens.whole_BHS), between(tokens.rest_BHS)
    segment, segment_before = between(tokens.segments_BS)
    row, column = _indices(late.size)
    is_late = row + late.start > column + early.start
    decay = jnp.exp((whole - whole_before) + (rest - rest_before))
    return jnp.where(is_late & (segment == segment_before), decay, 0.0)


def _kept(tokens: Coefficients, n: Array, length: int) -> Array:
    return tokens.read_BHS[n * length + length - 1]


def _indices(size: int) -> tuple[Array, Array]:
    each = jnp.arange(size, dtype=jnp.int32)
    return each[:, None], each[None, :]


def _dot(x: Array, y: Array) -> Array:
    """The product in float32, with the full precision of float32 operands."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return pallas_triton.dot(x, y, precision=precision)


def _call(
    kernel: Callable[..., None], name: str, grid: tuple[int, ...], inputs: Sequence[Any],
    outputs: Sequence[tuple[pl.BlockSpec, Any]], warps: int = 4,
) -> Callable[..., Any]:  # fmt: skip
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=inputs,
        out_specs=[spec for spec, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for _, like in outputs],
        compiler_params=pallas_triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=platform() != "cuda",
    )
