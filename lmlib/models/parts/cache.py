"""Keys and values of earlier tokens, for attention in later calls.

Position p is stored in slot p mod N. With fewer slots than positions, the cache is a ring of the
newest tokens, for a layer with a window. The contents of a slot follow from the newest position.

Shapes: B batch, R rows of the cache, S sequence (queries), N slots, T keys attended to, H heads, K
kv_heads, G = H / K query heads per key-value head, D head_dim of keys, V head_dim of values,
M = G · S.
"""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from lmlib.models.attend.kernel import Options, with_sinks
from lmlib.parallel.collectives import platform, shard_map
from lmlib.parallel.layout import COMPUTE, partition, repeats, reshard

_FEW = 16  # tokens of a row that a call writes in place, one by one
_BLOCK = 128  # slots that a CPU attends to at once
_KEYS, _VALUES = "batch kv_heads head_dim slot", "batch kv_heads slot head_dim"


class KeysAndValues(eqx.Module):
    """The cache of one layer; `tensor` splits its heads, `data` and `fsdp` its rows.

    Both arrays have the layout that products with one query read. `empty` is True, while tracing,
    if no call has written to the cache yet. With `first`, a call uses as many rows as it has texts,
    from that one on; without, it has a text for each row.
    """

    keys: Float[Array, "*layers b kv_heads head_dim slot"]
    values: Float[Array, "*layers b kv_heads slot value_dim"]
    empty: bool = eqx.field(static=True, default=False)
    first: Int32[Array, "*layers"] | None = None


def empty_cache(
    rows: int,
    slots: int,
    kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
    value_dim: int | None = None,
) -> KeysAndValues:
    """Returns a cache of zeros, with heads repeated as in attention over `tensor`."""
    mesh = jax.sharding.get_abstract_mesh()
    times = 1 if mesh.empty else repeats("kv_heads", kv_heads, COMPUTE, mesh)
    values_BKNV = jnp.zeros((rows, kv_heads * times, slots, value_dim or head_dim), dtype)
    keys_BKDN = jnp.zeros((rows, kv_heads * times, head_dim, slots), dtype)
    return KeysAndValues(reshard(keys_BKDN, _KEYS), reshard(values_BKNV, _VALUES), empty=True)


def extended(
    cache: KeysAndValues,
    k_BSKD: Float[Array, "b s kv_heads head_dim"],
    v_BSKV: Float[Array, "b s kv_heads value_dim"],
    positions_BS: Int32[Array, "b s"],
) -> KeysAndValues:
    """Returns `cache` with the tokens of a call, in the form that `attend_cached` takes."""
    new = partition("batch seq kv_heads head_dim")
    kept = partition(_KEYS), partition(_VALUES)
    fits = cache.empty and k_BSKD.shape[1] <= cache.keys.shape[-1]
    write = shard_map(
        _first_written if fits else _written,
        (*kept, new, new, partition("batch seq"), partition(())), kept, tracked=False,
    )  # fmt: skip
    given = k_BSKD, v_BSKV, positions_BS, cache.first
    return KeysAndValues(*write(cache.keys, cache.values, *given), first=cache.first)


def attend_cached(
    q_BSHD: Float[Array, "b s heads head_dim"],
    k_BSKD: Float[Array, "b s kv_heads head_dim"],
    v_BSKV: Float[Array, "b s kv_heads value_dim"],
    positions_BS: Int32[Array, "b s"],
    cache: KeysAndValues,
    options: Options,
    *,
    of_values_BSHV: Float[Array, "b s heads value_dim"] | None = None,
    sinks_H: Float[Array, "heads"] | None = None,
) -> tuple[Float[Array, "b s heads value_dim"], KeysAndValues]:
    """softmax(scale · q kᵀ) v over the tokens in `cache` and in this call, and the new cache.

    Softmax is in float32 or wider. Nothing is sent.

    Args:
      positions_BS: positions of this call's tokens, which follow the cache's; negative ones, at a
        row's end, are padding and are not stored.
      of_values_BSHV: queries for values: scores are scale · (q kᵀ + of_values vᵀ), as if each
        value were a part of its key.
    """
    after = extended(cache, k_BSKD, v_BSKV, positions_BS)
    heads, kv_heads = (partition(f"batch seq {each} head_dim") for each in ("heads", "kv_heads"))
    queries = [q_BSHD] if of_values_BSHV is None else [q_BSHD, of_values_BSHV]
    S, slots = q_BSHD.shape[1], cache.keys.shape[-1]
    # True if no token overwrites a key that another one attends to: in a ring with room for both,
    # and in a cache that is no ring, which has fewer slots than a window.
    in_place = options.window is None or not 0 <= slots - options.window < S - 1
    read = after if in_place else cache
    by_blocks = cache.first is not None and in_place and slots > _BLOCK and platform() == "cpu"
    mixed_BSHV, log_normaliser_BSH = shard_map(
        functools.partial(_attend_by_blocks, options)
        if by_blocks
        else functools.partial(_attend, options, in_place),
        (partition(_KEYS), partition(_VALUES), partition("batch seq"), partition(()))
        + (kv_heads,) * 2 + (heads,) * len(queries),
        (heads, partition("batch seq heads")),
        tracked=False,
    )(read.keys, read.values, positions_BS, cache.first, k_BSKD, v_BSKV, *queries)  # fmt: skip
    if sinks_H is not None:
        mixed_BSHV = with_sinks(mixed_BSHV, log_normaliser_BSH, sinks_H)
    return mixed_BSHV, after


def _positions_in(slots: int, newest_B: Int32[Array, "b"]) -> Int32[Array, "b slot"]:
    """The position in each slot once `newest_B` is written; negative for an empty slot."""
    newest_B1 = newest_B[:, None]
    return newest_B1 - (newest_B1 - jnp.arange(slots, dtype=jnp.int32)) % slots


def _first_written(
    keys_BKDN: Array, values_BKNV: Array, k_BSKD: Array, v_BSKV: Array, *_: Array | None
) -> tuple[Array, Array]:
    """Writes tokens from position 0 on. Padding comes after them, where nothing counts."""
    k_BKDS, v_BKSV = _as_stored(k_BSKD, v_BSKV, keys_BKDN.dtype)
    whole, empty = (0, 0), (0, keys_BKDN.shape[3] - k_BKDS.shape[3])
    keys_BKDN = jnp.pad(k_BKDS, (whole, whole, whole, empty))
    return keys_BKDN, jnp.pad(v_BKSV, (whole, whole, empty, whole))


def _as_stored(k_BSKD: Array, v_BSKV: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    k_BKDS = jnp.transpose(k_BSKD, (0, 2, 3, 1)).astype(dtype)
    return k_BKDS, jnp.swapaxes(v_BSKV, 1, 2).astype(dtype)


def _written(
    keys_BKDN: Array,
    values_BKNV: Array,
    k_BSKD: Array,
    v_BSKV: Array,
    positions_BS: Array,
    first: Array | None,
) -> tuple[Array, Array]:
    N, dtype = keys_BKDN.shape[3], keys_BKDN.dtype
    if first is not None or k_BSKD.shape[1] <= min(_FEW, N):
        given = k_BSKD.astype(dtype), v_BSKV.astype(dtype), positions_BS, first
        return _written_in_place(keys_BKDN, values_BKNV, *given)
    first_B, newest_B = positions_BS[:, 0], jnp.max(positions_BS, axis=1)
    # Index of the new token for each slot; a negative one leaves the slot unchanged.
    source_BN = _positions_in(N, newest_B) - first_B[:, None]
    is_new_BN = (source_BN >= 0) & (newest_B >= 0)[:, None]
    source_BN = jnp.clip(source_BN, 0)
    k_BKDS, v_BKSV = _as_stored(k_BSKD, v_BSKV, dtype)
    new_k_BKDN = jnp.take_along_axis(k_BKDS, source_BN[:, None, None, :], axis=3)
    new_v_BKNV = jnp.take_along_axis(v_BKSV, source_BN[:, None, :, None], axis=2)
    return (
        jnp.where(is_new_BN[:, None, None, :], new_k_BKDN, keys_BKDN),
        jnp.where(is_new_BN[:, None, :, None], new_v_BKNV, values_BKNV),
    )


def _written_in_place(
    keys_RKDN: Array,
    values_RKNV: Array,
    k_BSKD: Array,
    v_BSKV: Array,
    positions_BS: Array,
    first: Array | None,
) -> tuple[Array, Array]:
    """Writes the tokens one by one."""
    (B, S), N = positions_BS.shape, keys_RKDN.shape[3]
    first = jnp.int32(0) if first is None else first
    if B == S == 1:  # XLA's CPU compiler copies the cache, unless the update is in a branch

        def write(keys_RKDN: Array, values_RKNV: Array) -> tuple[Array, Array]:
            slot = positions_BS[0, 0] % N
            k_BKDS, v_BKSV = _as_stored(k_BSKD, v_BSKV, keys_RKDN.dtype)
            return (
                jax.lax.dynamic_update_slice(keys_RKDN, k_BKDS, (first, 0, 0, slot)),
                jax.lax.dynamic_update_slice(values_RKNV, v_BKSV, (first, 0, slot, 0)),
            )

        there = positions_BS[0, 0] >= 0
        return jax.lax.cond(there, write, lambda *kept: kept, keys_RKDN, values_RKNV)
    row_B1 = first + jnp.arange(B)[:, None]
    # Padding is dropped, and tokens that newer ones of this call would overwrite.
    is_kept_BS = positions_BS > jnp.max(positions_BS, axis=1, keepdims=True) - N
    slot_BS = jnp.where((positions_BS >= 0) & is_kept_BS, positions_BS % N, N)
    return (
        keys_RKDN.at[row_B1, :, :, slot_BS].set(k_BSKD, mode="drop"),
        values_RKNV.at[row_B1, :, slot_BS].set(v_BSKV, mode="drop"),
    )


def _attend(
    options: Options, in_place: bool, keys: Array, values: Array, positions_BS: Array,
    first: Array | None, k: Array, v: Array, *q: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention to the cache with the new tokens; or to the cache before, and the new tokens."""
    if first is not None:
        rows = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=len(positions_BS))
        keys, values = rows(keys, first), rows(values, first)
    newest_B = jnp.max(positions_BS, axis=1) if in_place else positions_BS[:, 0] - 1
    held_BT = _positions_in(keys.shape[3], newest_B)
    if not in_place:
        k_BKDS, v_BKSV = _as_stored(k, v, keys.dtype)
        keys = jnp.concatenate((keys, k_BKDS), axis=3)
        values = jnp.concatenate((values, v_BKSV), axis=2)
        held_BT = jnp.concatenate((held_BT, jnp.where(positions_BS < 0, -1, positions_BS)), axis=1)
    return _mix(options, keys, values, positions_BS, held_BT, *q)


def _attend_by_blocks(
    options: Options, keys_RKDN: Array, values_RKNV: Array, positions_BS: Array,
    first: Array | None, _k: Array, _v: Array, *q_BSHD: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention to the cache with the new tokens: row by row, in blocks up to each text's end.

    So a row costs as much, and has the same bits, whatever the other rows are. Sums are rescaled
    when the maximum grows (Milakov & Gimelshein 2018, arXiv:1805.02867).
    """
    (_, K, D, N), V = keys_RKDN.shape, values_RKNV.shape[3]
    row_B = jnp.arange(len(positions_BS)) + (0 if first is None else first)
    wide = jnp.promote_types(q_BSHD[0].dtype, jnp.float32)

    def of_row(arguments: tuple[Array, ...]) -> tuple[Array, Array]:
        row, positions_S, *q_SHD = arguments
        newest, positions_1S = jnp.max(positions_S), positions_S[None]
        held_1N = _positions_in(N, newest[None])
        queries, by_head = _as_rows(K, *(x_SHD[None] for x_SHD in q_SHD))

        def add(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            most_M1, total_M1, mixed_MV = carry  # [1, K, M, …]
            start = jnp.minimum(block * _BLOCK, N - _BLOCK)
            keys = jax.lax.dynamic_slice(keys_RKDN, (row, 0, 0, start), (1, K, D, _BLOCK))
            values = jax.lax.dynamic_slice(values_RKNV, (row, 0, start, 0), (1, K, _BLOCK, V))
            held_1T = jax.lax.dynamic_slice(held_1N, (0, start), (1, _BLOCK))
            is_new_T = start + jnp.arange(_BLOCK) >= block * _BLOCK
            held_1T = jnp.where(is_new_T, held_1T, -1)
            scores_MT = _scores(options, keys, values, positions_1S, held_1T, *queries)
            higher_M1 = jnp.maximum(most_M1, jnp.max(scores_MT, axis=-1, keepdims=True))
            weights_MT, factor_M1 = jnp.exp(scores_MT - higher_M1), jnp.exp(most_M1 - higher_M1)
            total_M1 = total_M1 * factor_M1 + jnp.sum(weights_MT, axis=-1, keepdims=True)
            weights_MT = weights_MT.astype(values.dtype)
            added_MV = jnp.einsum("bkmt,bktv->bkmv", weights_MT, values)
            return higher_M1, total_M1, mixed_MV * factor_M1 + added_MV

        zeros_M1 = jnp.zeros((*queries[0].shape[:3], 1), wide)
        carry = zeros_M1 + jnp.finfo(wide).min, zeros_M1, zeros_M1 + jnp.zeros(V, wide)
        blocks = -(-jnp.minimum(newest + 1, N) // _BLOCK)
        most_M1, total_M1, mixed_MV = jax.lax.fori_loop(0, blocks, add, carry)
        total_M1 = jnp.where(total_M1 == 0, 1, total_M1)  # a row without tokens
        mixed_SHV = by_head((mixed_MV / total_M1).astype(values_RKNV.dtype))[0]
        return mixed_SHV, by_head(most_M1 + jnp.log(total_M1))[0, ..., 0]

    return jax.lax.map(of_row, (row_B, positions_BS, *q_BSHD))


def _mix(
    options: Options, keys_BKDT: Array, values_BKTV: Array, positions_BS: Array, held_BT: Array,
    *q_BSHD: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns the mixed values and the logarithms of the normalisers."""
    queries, by_head = _as_rows(keys_BKDT.shape[1], *q_BSHD)
    scores_BKMT = _scores(options, keys_BKDT, values_BKTV, positions_BS, held_BT, *queries)
    weights_BKMT = jax.nn.softmax(scores_BKMT, axis=-1)
    log_normaliser_BKM1 = jax.nn.logsumexp(scores_BKMT, axis=-1, keepdims=True)
    mixed_BKMV = jnp.einsum("bkmt,bktv->bkmv", weights_BKMT.astype(values_BKTV.dtype), values_BKTV)
    return by_head(mixed_BKMV), by_head(log_normaliser_BKM1)[..., 0]


def _as_rows(K: int, *q_BSHD: Array) -> tuple[list[Array], Callable[[Array], Array]]:
    """The G heads that share keys, and the queries, as M rows of one matrix; and the inverse."""
    B, S, H, _ = q_BSHD[0].shape

    def rows(x_BSHD: Array) -> Array:
        x_BKGSD = jnp.transpose(x_BSHD.reshape(B, S, K, H // K, -1), (0, 2, 3, 1, 4))
        return x_BKGSD.reshape(B, K, H // K * S, -1)

    def by_head(x_BKMV: Array) -> Array:
        x_BKGSV = x_BKMV.reshape(B, K, H // K, S, -1)
        return jnp.transpose(x_BKGSV, (0, 3, 1, 2, 4)).reshape(B, S, H, -1)

    return [*map(rows, q_BSHD)], by_head


def _scores(
    options: Options, keys_BKDT: Array, values_BKTV: Array, positions_BS: Array, held_BT: Array,
    q_BKMD: Array, of_values_BKMV: Array | None = None,
) -> Array:  # fmt: skip
    """Returns the scores [B, K, M, T], with a finite minimum where a query sees nothing."""
    wide = jnp.promote_types(q_BKMD.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=wide)
    products_BKMT = product("bkmd,bkdt->bkmt", q_BKMD, keys_BKDT)
    if of_values_BKMV is not None:
        products_BKMT += product("bkmv,bktv->bkmt", of_values_BKMV, values_BKTV)
    seen_BST = _visible(positions_BS, held_BT, options.window)
    B, S, T = seen_BST.shape
    scores_BKGST = options.scores(products_BKMT).reshape(B, products_BKMT.shape[1], -1, S, T)
    # A finite minimum, since padding tokens attend to nothing.
    scores_BKGST = jnp.where(seen_BST[:, None, None], scores_BKGST, jnp.finfo(wide).min)
    return scores_BKGST.reshape(products_BKMT.shape)


def _visible(
    positions_BS: Int32[Array, "b s"], held_BT: Int32[Array, "b t"], window: int | None
) -> Bool[Array, "b s t"]:
    """True where a query attends to a token: itself and earlier ones, within the window."""
    held_B1T = held_BT[:, None, :]
    distance_BST = positions_BS[:, :, None] - held_B1T
    seen_BST = (held_B1T >= 0) & (distance_BST >= 0)
    return seen_BST if window is None else seen_BST & (distance_BST < window)
