"""The linear recurrence that Gated DeltaNet, Mamba-2 and Kimi Delta Attention share.

Shapes: B batch, S sequence, G kv_heads, R heads of each, H = G R heads, K key_dim, V value_dim, M
pieces of a row on a device, C pieces of it on all devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from lmlib.models.forward_context import ForwardContext
from lmlib.models.recurrent.chunks import Tokens, affine_map, applied, one_token, scanned
from lmlib.parallel.collectives import all_gather, axis_index, devices_along, platform, shard_map
from lmlib.parallel.layout import COMPUTE, mesh_axes_for, partition, reshard, whole_place
from lmlib.parallel.mesh_axes import MeshAxes, names_of
from lmlib.row_order import pieces_of_devices


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
    start of each document. Padding, at negative positions at the end of a row, changes no state.
    A value that is not finite reaches the other documents of its row, as with attention.

    `context.compute.recurrent_chunk` tokens at a time are products of matrices; only the inputs are
    kept for the backward pass. Devices that share a row exchange the states of its pieces.

    Args:
      q_BSGK, k_BSGK: H / G adjacent heads share a query and a key.
      state_BHKV: the state before the first token, in generation; `None`: zeros.
    """
    B, _, H, V = v_BSHV.shape
    wide = jnp.promote_types(v_BSHV.dtype, jnp.float32)
    if state_BHKV is None:
        state_BHKV = jnp.zeros((B, H, q_BSGK.shape[-1], V), wide)
    split = devices_along(mesh_axes_for("seq")) > 1
    queries, heads = "batch seq kv_heads head_dim", "batch seq heads head_dim"
    decays = heads if log_decay.ndim == 4 else "batch seq heads"
    inputs = (queries, queries, heads, decays, "batch seq heads", "batch seq", "batch seq")
    states = _every_row("batch heads head_dim head_dim", split)
    y_BSHV, end_BHKV = shard_map(
        functools.partial(_on_a_device, chunk=context.compute.recurrent_chunk, order=context.order),
        inputs=(*(_every_row(axes, split) for axes in inputs), states),
        outputs=(_every_row(heads, split), states),
        tracked=False,
    )(
        q_BSGK, k_BSGK, v_BSHV, log_decay.astype(wide),
        None if beta_BSH is None else beta_BSH.astype(wide),
        context.segment_ids_BS, context.positions_BS, state_BHKV.astype(wide),
    )  # fmt: skip
    return reshard(y_BSHV, heads), reshard(end_BHKV, "batch heads head_dim head_dim")


def _every_row(axes: str, split: bool) -> PartitionSpec:
    """The layout of `axes` with mesh axes of size 1 too, over which JAX would sum gradients."""
    names = axes.split()
    rows, sequence = (names_of(whole_place(COMPUTE[name])) for name in ("batch", "seq"))
    places = [*partition(axes)]
    if names[1] == "seq":
        places[1] = sequence
    elif not split:
        rows += sequence
    return PartitionSpec(rows, *places[1:])


def _on_a_device(
    q_BSGK: Array, k_BSGK: Array, v_BSHV: Array, log_decay: Array, beta_BSH: Array | None,
    segments_BS: Array | None, positions_BS: Array, state_BHKV: Array, chunk: int, order: str,
) -> tuple[Array, Array]:  # fmt: skip
    """`linear_recurrence` of this device's tokens and heads."""
    B, S, H, V = v_BSHV.shape
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    else:  # queries and keys differ by head, once they have decayed
        q_BSGK, k_BSGK = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q_BSGK, k_BSGK))
    G, K = q_BSGK.shape[2:]
    R = H // G
    counts_BS = positions_BS >= 0
    if segments_BS is None:
        segments_BS = jnp.zeros_like(positions_BS)
    else:  # padding continues the document before it
        last_B1 = jnp.maximum(jnp.sum(counts_BS, axis=1, keepdims=True) - 1, 0)
        end_B1 = jnp.take_along_axis(segments_BS, last_B1, axis=1)
        segments_BS = jnp.where(counts_BS, segments_BS, end_B1)

    def counted(x_BS: Array) -> Array:
        return jnp.where(counts_BS.reshape(B, S, *(1,) * (x_BS.ndim - 2)), x_BS, 0)

    def by_key(x_BSH: Array) -> Array:
        return x_BSH.reshape(B, S, G, R, *x_BSH.shape[3:])

    tokens = Tokens(
        q_BSGK, counted(k_BSGK), by_key(counted(v_BSHV)), by_key(counted(log_decay)),
        None if beta_BSH is None else by_key(beta_BSH), segments_BS,
    )  # fmt: skip
    state_BGKRV = state_BHKV.reshape(B, G, R, K, V).swapaxes(2, 3)
    mesh_axes = mesh_axes_for("seq")
    if devices_along(mesh_axes) > 1:
        y_BSGRV, state_BGKRV = _of_pieces(tokens, counts_BS, state_BGKRV, chunk, order, mesh_axes)
    elif S == 1:
        y_BSGRV, state_BGKRV = one_token(tokens, state_BGKRV)
    else:
        y_BSGRV, state_BGKRV = scanned(tokens, segments_BS[:, 0], state_BGKRV, chunk)
    if platform() == "cpu":
        y_BSGRV = _with_gradient_in_memory(y_BSGRV)
    return y_BSGRV.reshape(B, S, H, V), state_BGKRV.swapaxes(2, 3).reshape(B, H, K, V)


@jax.custom_vjp
def _with_gradient_in_memory(y: Array) -> Array:
    """`y`, whose gradient XLA's CPU backend computes once and not again, strided, in each copy.

    It fuses nothing with a branch. Both branches have the same values.
    """
    return y


def _in_memory(_: None, d_y: Array) -> tuple[Array]:
    is_none = jnp.isnan(d_y.reshape(-1)[0])
    return (jax.lax.cond(is_none, lambda d: jnp.where(d == d, d, jnp.nan), lambda d: d, d_y),)


_with_gradient_in_memory.defvjp(lambda y: (y, None), _in_memory)


def _of_pieces(
    tokens: Tokens, counts_BS: Array, state_BGKRV: Array, chunk: int, order: str,
    mesh_axes: MeshAxes,
) -> tuple[Array, Array]:  # fmt: skip
    """The outputs of this device's pieces of each row, and the state after the row.

    The state after a piece is an affine map of the state before it: A state + b. Devices exchange
    these maps, and combine them up to the start of each of their pieces.
    """
    pieces_CM = pieces_of_devices(devices_along(mesh_axes), order)
    own_M = jnp.asarray(pieces_CM)[axis_index(mesh_axes)]
    B, S = tokens.segments_BS.shape
    M = pieces_CM.shape[1]

    def in_row_order(x_BM: Array) -> Array:
        """Gathers the values of all pieces of the row."""
        return all_gather(x_BM, mesh_axes, axis=1)[:, np.argsort(pieces_CM.reshape(-1))]

    segments_BMP = tokens.segments_BS.reshape(B, M, -1)
    ends_BC = in_row_order(segments_BMP[..., -1])
    # A piece of padding alone continues the last document of the row.
    any_BM = jnp.any(counts_BS.reshape(B, M, -1), axis=2)
    last_B1 = jnp.sum(in_row_order(any_BM), axis=1, keepdims=True) - 1
    end_B1 = jnp.take_along_axis(ends_BC, jnp.maximum(last_B1, 0), axis=1)
    ends_BC = jnp.where(jnp.arange(ends_BC.shape[1]) > last_B1, end_B1, ends_BC)
    segments_BMP = jnp.where(any_BM[..., None], segments_BMP, end_B1[..., None])
    before_BM = jnp.where(own_M == 0, segments_BMP[..., 0], ends_BC[:, own_M - 1])
    tokens = tokens._replace(segments_BS=segments_BMP.reshape(B, S))
    tokens = jax.tree.map(lambda x: x.reshape(B * M, S // M, *x.shape[2:]), tokens)
    before_BM = before_BM.reshape(-1)
    of_row = (
        jnp.moveaxis(in_row_order(x.reshape(B, M, *x.shape[1:])), 1, 0)
        for x in affine_map(tokens, before_BM, chunk)
    )

    def step(state_BGKRV: Array, of_piece: tuple[Array, ...]) -> tuple[Array, Array]:
        factor, added_BGKRV = of_piece
        return applied(factor, added_BGKRV, state_BGKRV), state_BGKRV

    end_BGKRV, starts_CBGKRV = jax.lax.scan(step, state_BGKRV, tuple(of_row))
    own_starts = jnp.moveaxis(starts_CBGKRV[own_M], 0, 1).reshape(B * M, *state_BGKRV.shape[1:])
    y_BPGRV, _ = scanned(tokens, before_BM, own_starts, chunk)
    return y_BPGRV.reshape(B, S, *y_BPGRV.shape[2:]), end_BGKRV
