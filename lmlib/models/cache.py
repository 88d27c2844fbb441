"""Keys and values of the tokens so far, from which a layer goes on.

Position p lies in slot p mod N. With as many slots as positions that keeps all of them; with fewer
it is a ring of the newest, which is all that a layer with a window needs. What a slot holds follows
from the newest position alone, so nothing else is kept, and where a token lies does not depend on
what else is in its batch.

Shapes: B batch, S sequence (queries), N slots, T keys attended to, H heads, K kv_heads, G = H / K
query heads to each key-value head, D head_dim.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from lmlib.models.attend.options import Options
from lmlib.parallel.layout import COMPUTE, partition, repeats, reshard
from lmlib.parallel.local import on_each_device

_AXES = "batch kv_heads slot head_dim"


class KeysAndValues(eqx.Module):
    """What one layer keeps of earlier calls; `tensor` splits its heads, `data` and `fsdp` its rows.

    `empty` says, while tracing, that no call has written to it yet.
    """

    keys: Float[Array, "b kv_heads slot head_dim"]
    values: Float[Array, "b kv_heads slot head_dim"]
    empty: bool = eqx.field(static=True, default=False)


def empty_cache(
    rows: int, slots: int, kv_heads: int, head_dim: int, dtype: DTypeLike
) -> KeysAndValues:
    """A cache of zeros. Key-value heads that attention repeats over `tensor` are kept repeated."""
    mesh = jax.sharding.get_abstract_mesh()
    times = 1 if mesh.empty else repeats("kv_heads", kv_heads, COMPUTE, mesh)
    zeros = reshard(jnp.zeros((rows, kv_heads * times, slots, head_dim), dtype), _AXES)
    return KeysAndValues(zeros, zeros, empty=True)


def extended(
    cache: KeysAndValues,
    k_BSKD: Float[Array, "b s kv_heads head_dim"],
    v_BSKD: Float[Array, "b s kv_heads head_dim"],
    positions_BS: Int32[Array, "b s"],
) -> KeysAndValues:
    """`cache` with the tokens of a call in it, as `attend_cached` takes them."""
    new = partition("batch seq kv_heads head_dim")
    kept, tokens = partition(_AXES), partition("batch seq")
    write = on_each_device(_written, (kept, new, tokens), kept, tracked=False)
    return KeysAndValues(
        write(cache.keys, k_BSKD, positions_BS), write(cache.values, v_BSKD, positions_BS)
    )


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
    kept, tokens = partition(_AXES), partition("batch seq")
    heads, kv_heads = (
        partition("batch seq heads head_dim"),
        partition("batch seq kv_heads head_dim"),
    )
    if q_BSHD.shape[1] == 1:  # one token has overwritten none that it sees
        mixed_BSHD = on_each_device(
            functools.partial(_attend_one, options=options), (heads, kept, kept, tokens), heads,
            tracked=False,
        )(q_BSHD, after.keys, after.values, positions_BS)  # fmt: skip
    else:
        mixed_BSHD = on_each_device(
            functools.partial(_attend_many, options=options),
            (heads, kv_heads, kv_heads, kept, kept, tokens), heads, tracked=False,
        )(q_BSHD, k_BSKD, v_BSKD, cache.keys, cache.values, positions_BS)  # fmt: skip
    return mixed_BSHD, after


def _positions_in(slots: int, newest_B: Int32[Array, "b"]) -> Int32[Array, "b slot"]:
    """The position that each slot holds after position `newest_B`; negative: none yet."""
    newest_B1 = newest_B[:, None]
    return newest_B1 - (newest_B1 - jnp.arange(slots, dtype=jnp.int32)) % slots


def _written(kept_BKND: Array, new_BSKD: Array, positions_BS: Array) -> Array:
    B, S, _, _ = new_BSKD.shape
    N = kept_BKND.shape[2]
    if S == 1:
        position_B = positions_BS[:, 0]
        slot_B = jnp.where(position_B < 0, N, position_B % N)  # N: none
        return kept_BKND.at[jnp.arange(B), :, slot_B].set(
            new_BSKD[:, 0].astype(kept_BKND.dtype), mode="drop"
        )
    first_B, newest_B = positions_BS[:, 0], jnp.max(positions_BS, axis=1)
    # Which of the new tokens each slot gets; a negative one leaves it as it is.
    source_BN = _positions_in(N, newest_B) - first_B[:, None]
    is_new_BN = (source_BN >= 0) & (newest_B >= 0)[:, None]
    new_BKSD = jnp.swapaxes(new_BSKD, 1, 2).astype(kept_BKND.dtype)
    moved_BKND = jnp.take_along_axis(new_BKSD, jnp.clip(source_BN, 0)[:, None, :, None], axis=2)
    return jnp.where(is_new_BN[:, None, :, None], moved_BKND, kept_BKND)


def _attend_one(
    q_BSHD: Array, keys_BKND: Array, values_BKND: Array, positions_BS: Array, options: Options
) -> Array:
    """One query in each row, whose own key and value are in the cache already."""
    held_BN = _positions_in(keys_BKND.shape[2], positions_BS[:, 0])
    return _mix(q_BSHD, keys_BKND, values_BKND, positions_BS, held_BN, options)


def _attend_many(
    q_BSHD: Array,
    k_BSKD: Array,
    v_BSKD: Array,
    keys_BKND: Array,
    values_BKND: Array,
    positions_BS: Array,
    options: Options,
) -> Array:
    """Over what was there before, and then what is new: a ring's writes may hide the former."""
    held_BN = _positions_in(keys_BKND.shape[2], positions_BS[:, 0] - 1)
    new_BS = jnp.where(positions_BS < 0, -1, positions_BS)

    def joined(kept_BKND: Array, new_BSKD: Array) -> Array:
        new_BKSD = jnp.swapaxes(new_BSKD, 1, 2).astype(kept_BKND.dtype)
        return jnp.concatenate((kept_BKND, new_BKSD), axis=2)

    return _mix(
        q_BSHD,
        joined(keys_BKND, k_BSKD),
        joined(values_BKND, v_BSKD),
        positions_BS,
        jnp.concatenate((held_BN, new_BS), axis=1),
        options,
    )


def _mix(
    q_BSHD: Float[Array, "b s h d"],
    keys_BKTD: Float[Array, "b k t d"],
    values_BKTD: Float[Array, "b k t d"],
    positions_BS: Int32[Array, "b s"],
    held_BT: Int32[Array, "b t"],
    options: Options,
) -> Float[Array, "b s h d"]:
    B, S, H, D = q_BSHD.shape
    q_BKGSD = jnp.transpose(q_BSHD.reshape(B, S, keys_BKTD.shape[1], -1, D), (0, 2, 3, 1, 4))
    wide = jnp.promote_types(q_BSHD.dtype, jnp.float32)
    scores_BKGST = jnp.einsum("bkgsd,bktd->bkgst", q_BKGSD, keys_BKTD, preferred_element_type=wide)
    seen_BST = _visible(positions_BS, held_BT, options.window)
    # Finite, since a padding token sees nothing.
    hidden = jnp.finfo(wide).min
    scores_BKGST = jnp.where(seen_BST[:, None, None], options.scores(scores_BKGST), hidden)
    weights_BKGST = jax.nn.softmax(scores_BKGST, axis=-1).astype(values_BKTD.dtype)
    mixed_BKGSD = jnp.einsum("bkgst,bktd->bkgsd", weights_BKGST, values_BKTD)
    return jnp.transpose(mixed_BKGSD, (0, 3, 1, 2, 4)).reshape(B, S, H, D)


def _visible(
    positions_BS: Int32[Array, "b s"], held_BT: Int32[Array, "b t"], window: int | None
) -> Bool[Array, "b s t"]:
    """Which tokens each query sees: itself and earlier ones, within the window."""
    held_B1T = held_BT[:, None, :]
    distance_BST = positions_BS[:, :, None] - held_B1T
    seen_BST = (held_B1T >= 0) & (distance_BST >= 0)
    return seen_BST if window is None else seen_BST & (distance_BST < window)
