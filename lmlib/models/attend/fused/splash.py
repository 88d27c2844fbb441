"""Splash attention: Pallas's fused attention for TPUs, which skips fully masked tiles.

JAX's own `process_mask` compares all pairs of tokens, which takes minutes for rows of 65,536 tokens
or more. The tokens of a tile are adjacent, so its first and last token determine its visible tiles.

Shapes: C devices along `context`, B batch, S sequence (queries), T sequence (keys), H heads, K
kv_heads, D head_dim of queries and keys, V head_dim of values, N tiles of queries, M tiles of keys,
W the maximum number of tiles that a tile of the other side visits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jaxtyping import Array, Bool, Int

from lmlib.models.attend.kernel import Kernel, Options, Places, Shapes
from lmlib.models.attend.tiles import largest_tile
from lmlib.parallel.collectives import platform


class Visible(NamedTuple):
    """True if a query attends to a key, by their positions in the row; computed in the kernel."""

    window: int | None

    def __call__(self, query: Array, key: Array) -> Array:
        seen = query >= key
        return seen if self.window is None else seen & (query - key < self.window)


def visited(
    places_CS: Int[np.ndarray, "c s"], keys: int, tile: int, window: int | None
) -> tuple[MaskInfo, MaskInfo]:
    """The key tiles that each query tile visits, and the query tiles that each key tile visits.

    Arrays have an axis of devices before the axes that the kernel expects. Positions of the queries
    in a tile are adjacent; `keys` are the tokens of the row.
    """
    first_CN1 = places_CS[:, ::tile, None]
    last_CN1, first_M = first_CN1 + tile - 1, np.arange(0, keys, tile)
    visible_CNM = last_CN1 >= first_M
    if window is not None:
        visible_CNM &= first_CN1 - (first_M + tile - 1) < window
    places_CS = places_CS.astype(np.int32)
    keys_CNW, computed_CNW = _in_order(visible_CNM)
    queries_CMW, computed_CMW = _in_order(visible_CNM.swapaxes(1, 2))
    return (
        _info(keys_CNW, computed_CNW, places_CS),
        _info(queries_CMW.swapaxes(1, 2), computed_CMW.swapaxes(1, 2), places_CS),
    )


def _in_order(
    visible_CNM: Bool[np.ndarray, "c n m"],
) -> tuple[Int[np.ndarray, "c n w"], Int[np.ndarray, "c n w"]]:
    """The visible tiles of each tile in order, and 1 for each that is computed.

    The last one is repeated as padding: the kernel does not load or compute it again.
    """
    visits_CN1 = visible_CNM.sum(axis=2, keepdims=True)
    steps_W = np.arange(visits_CN1.max())
    ordered_CNM = np.argsort(~visible_CNM, axis=2, kind="stable")
    tiles_CNW = np.take_along_axis(
        ordered_CNM, np.minimum(steps_W, np.maximum(visits_CN1 - 1, 0)), axis=2
    )
    return tiles_CNW, (steps_W < visits_CN1).astype(np.int8)


def _info(
    tiles: Int[np.ndarray, "c x y"],
    computed: Int[np.ndarray, "c x y"],
    places_CS: Int[np.ndarray, "c s"],
) -> MaskInfo:
    smallest = next(
        each for each in (np.int8, np.int16, np.int32) if tiles.max() <= np.iinfo(each).max
    )
    return MaskInfo(
        data_next=tiles[:, None].astype(smallest),  # one list for all heads
        mask_next=None,
        block_mask=computed[:, None],
        partial_mask_blocks=None,
        q_sequence=places_CS,
    )


_LANES = 128  # lanes of a TPU's vector unit: tiles are multiples of it
_LARGEST_TILE = 512


def problem(shapes: Shapes) -> str | None:
    """The reason why splash attention does not support these shapes; `None` if it does."""
    if jnp.dtype(shapes.dtype) not in (jnp.bfloat16, jnp.float32):
        return f"splash computes in bfloat16 or float32, not in {jnp.dtype(shapes.dtype)}"
    if shapes.sequence_length % _LANES:
        length = shapes.sequence_length
        return f"splash needs a sequence length that is a multiple of {_LANES}, not {length}"
    if shapes.head_dim % 64:
        return f"splash needs a head_dim that is a multiple of 64, not {shapes.head_dim}"
    return None


def attend(
    q_BSHD: Array, k_BTKD: Array, v_BTKV: Array, segments_BS: Any, segments_BT: Any,
    places: Places, options: Options,
) -> tuple[Array, None]:  # fmt: skip
    """See `lmlib.models.attend.kernel.Kernel`. Without a TPU, Pallas interprets the kernel."""
    segments = kernel.SegmentIds(segments_BS, segments_BT)
    devices_CS, own, piece = places
    tile = _LANES * largest_tile(piece // _LANES, _LARGEST_TILE // _LANES)
    of_devices = visited(devices_CS, k_BTKD.shape[1], tile, options.window)
    to_keys, to_queries = jax.tree.map(lambda x_C: jnp.asarray(x_C)[own], of_devices)
    attend_HSD = kernel.SplashAttentionKernel(
        to_keys,
        to_keys,
        to_queries,
        block_sizes=kernel.BlockSizes(
            block_q=tile, block_kv=tile, block_kv_compute=tile,
            block_q_dkv=tile, block_kv_dkv=tile, block_kv_dkv_compute=tile,
            block_q_dq=tile, block_kv_dq=tile,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=options.soft_cap,
        residual_checkpoint_name="attention_kernel",
        mask_function=Visible(options.window),
        interpret=platform() != "tpu",
    )  # fmt: skip
    q_BSHD = q_BSHD * options.scale
    q_BHSD, k_BKTD, v_BKTV = (x.transpose(0, 2, 1, 3) for x in (q_BSHD, k_BTKD, v_BTKV))
    mixed_BHSV = jnp.asarray(jax.vmap(attend_HSD)(q_BHSD, k_BKTD, v_BKTV, segments))
    return mixed_BHSV.transpose(0, 2, 1, 3), None


KERNEL = Kernel(attend, problem, has_normaliser=False, takes_pieces=True)
