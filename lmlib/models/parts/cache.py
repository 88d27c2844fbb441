"""Keys and values of the tokens so far, from which a layer goes on.

Position p lies in slot p mod N. With as many slots as positions that keeps all of them; with fewer
it is a ring of the newest, which is all that a layer with a window needs. What a slot holds follows
from the newest position alone, so nothing else is kept, and where a token lies does not depend on
what else is in its batch.

Shapes: B batch, S sequence (queries), N slots, T keys attended to, H heads, K kv_heads, G = H / K
query heads to each key-value head, D head_dim, M = G · S.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from lmlib.models.attend.options import Options
from lmlib.parallel.collectives import on_each_device
from lmlib.parallel.layout import COMPUTE, partition, repeats, reshard

_KEYS, _VALUES = "batch kv_heads head_dim slot", "batch kv_heads slot head_dim"


class KeysAndValues(eqx.Module):
    """What one layer keeps of earlier calls; `tensor` splits its heads, `data` and `fsdp` its rows.

    Each lies as its product with one query reads it, so that nothing is copied for a token.
    `empty` says, while tracing, that no call has written to it yet.
    """

    keys: Float[Array, "b kv_heads head_dim slot"]
    values: Float[Array, "b kv_heads slot head_dim"]
    empty: bool = eqx.field(static=True, default=False)


def empty_cache(
    rows: int, slots: int, kv_heads: int, head_dim: int, dtype: DTypeLike
) -> KeysAndValues:
    """A cache of zeros. Key-value heads that attention repeats over `tensor` are kept repeated."""
    mesh = jax.sharding.get_abstract_mesh()
    times = 1 if mesh.empty else repeats("kv_heads", kv_heads, COMPUTE, mesh)
    values_BKND = jnp.zeros((rows, kv_heads * times, slots, head_dim), dtype)
    keys_BKDN = jnp.zeros((rows, kv_heads * times, head_dim, slots), dtype)
    return KeysAndValues(reshard(keys_BKDN, _KEYS), reshard(values_BKND, _VALUES), empty=True)


def extended(
    cache: KeysAndValues,
    k_BSKD: Float[Array, "b s kv_heads head_dim"],
    v_BSKD: Float[Array, "b s kv_heads head_dim"],
    positions_BS: Int32[Array, "b s"],
) -> KeysAndValues:
    """`cache` with the tokens of a call in it, as `attend_cached` takes them."""
    new = partition("batch seq kv_heads head_dim")
    kept = partition(_KEYS), partition(_VALUES)
    fits = cache.empty and k_BSKD.shape[1] <= cache.keys.shape[-1]
    write = on_each_device(
        _first_written if fits else _written,
        (*kept, new, new, partition("batch seq")), kept, tracked=False,
    )  # fmt: skip
    return KeysAndValues(*write(cache.keys, cache.values, k_BSKD, v_BSKD, positions_BS))


def attend_cached(
    q_BSHD: Float[Array, "b s heads head_dim"],
    k_BSKD: Float[Array, "b s kv_heads head_dim"],
    v_BSKD: Float[Array, "b s kv_heads head_dim"],
    positions_BS: Int32[Array, "b s"],
    cache: KeysAndValues,
    options: Options,
) -> tuple[Float[Array, "b s heads head_dim"], KeysAndValues]:
    """softmax(scale · q kᵀ) v over the tokens in `cache` and those of this call, and the new cache.

    Args:
      positions_BS: of this call's tokens: in each row they follow each other and those in the
        cache. Tokens at negative ones, at a row's end, are padding, of which nothing is kept.

    Softmax is in float32 at least. Nothing is sent.
    """
    after = extended(cache, k_BSKD, v_BSKD, positions_BS)
    heads, kv_heads = (
        partition("batch seq heads head_dim"),
        partition("batch seq kv_heads head_dim"),
    )
    kept, tokens = (partition(_KEYS), partition(_VALUES)), partition("batch seq")
    if q_BSHD.shape[1] == 1:  # one token has overwritten none that it sees
        mixed_BSHD = on_each_device(
            functools.partial(_attend_one, options=options),
            (heads, *kept, tokens), heads, tracked=False,
        )(q_BSHD, after.keys, after.values, positions_BS)  # fmt: skip
    else:
        mixed_BSHD = on_each_device(
            functools.partial(_attend_many, options=options),
            (heads, kv_heads, kv_heads, *kept, tokens), heads, tracked=False,
        )(q_BSHD, k_BSKD, v_BSKD, cache.keys, cache.values, positions_BS)  # fmt: skip
    return mixed_BSHD, after


def _positions_in(slots: int, newest_B: Int32[Array, "b"]) -> Int32[Array, "b slot"]:
    """The position that each slot holds after position `newest_B`; negative: none yet."""
    newest_B1 = newest_B[:, None]
    return newest_B1 - (newest_B1 - jnp.arange(slots, dtype=jnp.int32)) % slots


def _first_written(
    keys_BKDN: Array, values_BKND: Array, k_BSKD: Array, v_BSKD: Array, positions_BS: Array
) -> tuple[Array, Array]:
    """With tokens from position 0 on. Padding lies beyond a row's newest position, where nothing
    counts."""
    k_BKDS = jnp.transpose(k_BSKD, (0, 2, 3, 1)).astype(keys_BKDN.dtype)
    v_BKSD = jnp.swapaxes(v_BSKD, 1, 2).astype(values_BKND.dtype)
    empty = 0, keys_BKDN.shape[3] - k_BKDS.shape[3]
    whole = 0, 0
    return (
        jnp.pad(k_BKDS, (whole, whole, whole, empty)),
        jnp.pad(v_BKSD, (whole, whole, empty, whole)),
    )


def _written(
    keys_BKDN: Array, values_BKND: Array, k_BSKD: Array, v_BSKD: Array, positions_BS: Array
) -> tuple[Array, Array]:
    S = k_BSKD.shape[1]
    N = keys_BKDN.shape[3]
    k_BSKD, v_BSKD = k_BSKD.astype(keys_BKDN.dtype), v_BSKD.astype(keys_BKDN.dtype)
    if S == 1:
        return _token_written(
            keys_BKDN, values_BKND, k_BSKD[:, 0], v_BSKD[:, 0], positions_BS[:, 0]
        )
    first_B, newest_B = positions_BS[:, 0], jnp.max(positions_BS, axis=1)
    # Which of the new tokens each slot gets; a negative one leaves it as it is.
    source_BN = _positions_in(N, newest_B) - first_B[:, None]
    is_new_BN = (source_BN >= 0) & (newest_B >= 0)[:, None]
    source_BN = jnp.clip(source_BN, 0)
    new_k_BKDN = jnp.take_along_axis(
        jnp.transpose(k_BSKD, (0, 2, 3, 1)), source_BN[:, None, None, :], axis=3
    )
    new_v_BKND = jnp.take_along_axis(
        jnp.swapaxes(v_BSKD, 1, 2), source_BN[:, None, :, None], axis=2
    )
    return (
        jnp.where(is_new_BN[:, None, None, :], new_k_BKDN, keys_BKDN),
        jnp.where(is_new_BN[:, None, :, None], new_v_BKND, values_BKND),
    )


def _token_written(
    keys_BKDN: Array, values_BKND: Array, k_BKD: Array, v_BKD: Array, position_B: Array
) -> tuple[Array, Array]:
    """With one token of each row; in place."""
    B, _, _, N = keys_BKDN.shape
    slot_B = position_B % N
    if B == 1:  # for one row XLA's CPU compiler copies the cache, but not for an update in a branch

        def write(keys_BKDN: Array, values_BKND: Array) -> tuple[Array, Array]:
            slot = slot_B[0]
            return (
                jax.lax.dynamic_update_slice(keys_BKDN, k_BKD[..., None], (0, 0, 0, slot)),
                jax.lax.dynamic_update_slice(values_BKND, v_BKD[:, :, None], (0, 0, slot, 0)),
            )

        return jax.lax.cond(position_B[0] >= 0, write, lambda *kept: kept, keys_BKDN, values_BKND)
    row_B, slot_B = jnp.arange(B), jnp.where(position_B < 0, N, slot_B)  # N: none
    return (
        keys_BKDN.at[row_B, :, :, slot_B].set(k_BKD, mode="drop"),
        values_BKND.at[row_B, :, slot_B].set(v_BKD, mode="drop"),
    )


def _attend_one(
    q_BSHD: Array, keys_BKDN: Array, values_BKND: Array, positions_BS: Array, options: Options
) -> Array:
    """One query in each row, whose own key and value are in the cache already."""
    held_BN = _positions_in(keys_BKDN.shape[3], positions_BS[:, 0])
    return _mix(q_BSHD, keys_BKDN, values_BKND, positions_BS, held_BN, options)


def _attend_many(
    q_BSHD: Array,
    k_BSKD: Array,
    v_BSKD: Array,
    keys_BKDN: Array,
    values_BKND: Array,
    positions_BS: Array,
    options: Options,
) -> Array:
    """Over what was there before, and then what is new: a ring's writes may hide the former."""
    held_BN = _positions_in(keys_BKDN.shape[3], positions_BS[:, 0] - 1)
    new_BS = jnp.where(positions_BS < 0, -1, positions_BS)
    k_BKDS = jnp.transpose(k_BSKD, (0, 2, 3, 1)).astype(keys_BKDN.dtype)
    v_BKSD = jnp.swapaxes(v_BSKD, 1, 2).astype(values_BKND.dtype)
    return _mix(
        q_BSHD,
        jnp.concatenate((keys_BKDN, k_BKDS), axis=3),
        jnp.concatenate((values_BKND, v_BKSD), axis=2),
        positions_BS,
        jnp.concatenate((held_BN, new_BS), axis=1),
        options,
    )


def _mix(
    q_BSHD: Float[Array, "b s h d"],
    keys_BKDT: Float[Array, "b k d t"],
    values_BKTD: Float[Array, "b k t d"],
    positions_BS: Int32[Array, "b s"],
    held_BT: Int32[Array, "b t"],
    options: Options,
) -> Float[Array, "b s h d"]:
    B, S, H, D = q_BSHD.shape
    K = keys_BKDT.shape[1]
    wide = jnp.promote_types(q_BSHD.dtype, jnp.float32)
    # The G heads that share keys, and the queries, are rows of one matrix.
    q_BKGSD = jnp.transpose(q_BSHD.reshape(B, S, K, -1, D), (0, 2, 3, 1, 4))
    q_BKMD = q_BKGSD.reshape(B, K, -1, D)
    scores_BKMT = jnp.einsum("bkmd,bkdt->bkmt", q_BKMD, keys_BKDT, preferred_element_type=wide)
    scores_BKGST = options.scores(scores_BKMT).reshape(B, K, -1, S, scores_BKMT.shape[-1])
    seen_BST = _visible(positions_BS, held_BT, options.window)
    # Finite, since a padding token sees nothing.
    scores_BKGST = jnp.where(seen_BST[:, None, None], scores_BKGST, jnp.finfo(wide).min)
    weights_BKMT = jax.nn.softmax(scores_BKGST, axis=-1).reshape(scores_BKMT.shape)
    mixed_BKMD = jnp.einsum("bkmt,bktd->bkmd", weights_BKMT.astype(values_BKTD.dtype), values_BKTD)
    mixed_BKGSD = mixed_BKMD.reshape(q_BKGSD.shape)
    return jnp.transpose(mixed_BKGSD, (0, 3, 1, 2, 4)).reshape(B, S, H, D)


def _visible(
    positions_BS: Int32[Array, "b s"], held_BT: Int32[Array, "b t"], window: int | None
) -> Bool[Array, "b s t"]:
    """Which tokens each query sees: itself and earlier ones, within the window."""
    held_B1T = held_BT[:, None, :]
    distance_BST = positions_BS[:, :, None] - held_B1T
    seen_BST = (held_B1T >= 0) & (distance_BST >= 0)
    return seen_BST if window is None else seen_BST & (distance_BST < window)
