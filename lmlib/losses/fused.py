"""Losses of the logits of each token, computed a chunk of tokens at a time.

Each device computes the logits of its own tokens and its own part of the vocabulary, once, together
with the gradient, and stores none of them; a few numbers for each token are sent over `tensor`.

Shapes: B batch, S sequence, E embed, V vocab, N tokens of a chunk, C chunks.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features, is_split
from lmlib.losses.objective import LossSums
from lmlib.models.forward_context import Observe
from lmlib.models.model import Model, capped
from lmlib.parallel import collectives
from lmlib.parallel.collectives import all_gather, pmax, psum, psum_scatter, shard_map
from lmlib.parallel.layout import STORED, mesh_axes_for, partition
from lmlib.parallel.mesh_axes import REPLICA_AXES, TOKENS

_EVERYWHERE = PartitionSpec()


class ChunkLogits(NamedTuple):
    """This device's part of the logits of a chunk of tokens, and statistics over all parts."""

    logits_NV: Float[Array, "n v"]  # capped, float32 or wider
    is_target_NV: Bool[Array, "n v"]  # True once in each row, on the device that has the target
    highest_N: Float[Array, "n"]  # the largest logit
    log_normaliser_N: Float[Array, "n"]  # log Σ exp(logits - highest) over the whole vocabulary
    log_p_NV: Float[Array, "n v"]  # the log-probability of each token id, nats
    p_NV: Float[Array, "n v"]  # its probability, which is also d log_z / d logit
    cross_entropy_N: Float[Array, "n"]  # -log p(target), nats

    @property
    def log_z_N(self) -> Float[Array, "n"]:
        """log Σ exp logits over the whole vocabulary."""
        return self.highest_N + self.log_normaliser_N


class TokenLosses(NamedTuple):
    """The losses of the tokens of a chunk."""

    loss_N: Float[Array, "n"]  # nats
    reported: dict[str, Float[Array, "n"]]  # numbers to report, by name
    dlogits_NV: Float[Array, "n v"]  # the gradient of `loss_N` for this device's logits


# A loss of a token's logits, hashable: `loss(logits, tokens, tables)`, with the chunk's part of the
# `tokens` and the `tables` of `fused_loss`. Each device calls it for its part of the vocabulary.
TokenLoss = Callable[[ChunkLogits, tuple[Array, ...], tuple[Array, ...]], TokenLosses]


class _Call(NamedTuple):
    """The static part of a call."""

    loss: TokenLoss
    cap: float | None
    chunk: int | None
    dtype: str
    split: bool  # True if the features' sequence is split
    tokens: int  # numbers of extra arrays
    tables: int

    @property
    def layouts(self) -> tuple[PartitionSpec, ...]:
        tokens, table = partition("batch seq"), partition("embed vocab")
        return (*inputs(self.split), *(tokens,) * (2 + self.tokens), *(table,) * self.tables)


def batch_sums(
    loss: TokenLoss,
    model: Model,
    batch: Batch,
    compute: Compute,
    key: PRNGKeyArray | None = None,
    dropout: float = 0.0,
    observe: Observe | None = None,
    tokens: tuple[Array, ...] = (),
    tables: tuple[Array, ...] = (),
) -> tuple[LossSums, Any]:
    """Sums `loss` over the valid targets of `batch`; also returns the results of `observe`.

    See `lmlib.losses.features.features` and `fused_loss` for the arguments.
    """
    found = features(model, batch, compute, key, dropout, observe)
    with jax.named_scope("loss"):
        sums = fused_loss(
            loss, found.h_BSE, model.unembedding_EV(), jnp.asarray(batch.targets),
            jnp.asarray(batch.loss_mask), tokens, tables, cap=model.logit_cap,
            chunk=compute.loss_chunk, dtype=compute.logits_dtype,
        )  # fmt: skip
    return sums._replace(model=found.aux), found.observed


def fused_loss(
    loss: TokenLoss,
    h_BSE: Float[Array, "b s embed"],
    table_EV: Float[Array, "embed vocab"],
    targets_BS: Int32[Array, "b s"],
    weights_BS: Float[Array, "b s"] | Bool[Array, "b s"],
    tokens: tuple[Array, ...] = (),
    tables: tuple[Array, ...] = (),
    *,
    cap: float | None = None,
    chunk: int | None = None,
    dtype: str = "float32",
) -> LossSums:
    """Returns sums over tokens of `weights_BS` times the `loss` of the logits h · table.

    A token of weight 0 does not contribute, even with infinite logits. The sequence of `h_BSE` is
    whole or split over `tensor`; the table is as stored. Each chunk's gradients, for h and the
    table only, are computed together with its logits (the idea of Liger's fused loss: Hsu et al.
    2024, arXiv:2410.10989), and the backward pass multiplies them by the incoming gradient.

    Args:
      tokens, tables: further arrays (b, s, …) and (embed, vocab), whole along embed, for `loss`.
      cap, chunk: see `Model.logit_cap` and `split_into_chunks`.
      dtype: dtype of the logits, unless the features' is wider; softmax is in float32 or wider.
    """
    call = _Call(loss, cap, chunk, dtype, is_split(h_BSE), len(tokens), len(tables))
    arguments: tuple[Array, ...] = h_BSE, table_EV, targets_BS, weights_BS, *tokens, *tables
    if not jax.sharding.get_abstract_mesh().empty:
        arguments = tuple(map(jax.sharding.reshard, arguments, call.layouts))
    return _sums(call, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(call: _Call, *arguments: Array) -> LossSums:
    local = functools.partial(_local, call, 0)
    return shard_map(local, call.layouts, (_EVERYWHERE, ()), tracked=False)(*arguments)[0]


def _forward(call: _Call, *arguments: CustomVJPPrimal) -> tuple[LossSums, tuple[Array, ...]]:
    """Returns the sums, and the gradients of features and, unless it is frozen, of the table."""
    asked = 2 if arguments[1].perturbed else 1
    local = functools.partial(_local, call, asked)
    outputs = _EVERYWHERE, call.layouts[:asked]
    on_devices = shard_map(local, call.layouts, outputs, tracked=False)
    return on_devices(*(each.value for each in arguments))


def _backward(
    call: _Call, gradients: tuple[Array, ...], arriving: LossSums
) -> tuple[Array | None, ...]:
    factor = arriving.loss_sum
    if isinstance(factor, SymbolicZero):
        return (None,) * len(call.layouts)
    found = [(gradient * factor).astype(gradient.dtype) for gradient in gradients]
    return (*found, *(None,) * (len(call.layouts) - len(found)))


_sums.defvjp(_forward, _backward, symbolic_zeros=True)


def _local(
    call: _Call, asked: int, h_BSE: Array, table_EV: Array, *others: Array
) -> tuple[LossSums, tuple[Array, ...]]:
    """Returns the sums, and the gradients of the first `asked` arrays of features and table."""
    h_BSE, whole_EV = gathered(call.split, h_BSE, table_EV)
    wide = jnp.promote_types(h_BSE.dtype, jnp.float32)

    def visit(
        dtable_EV: Array | None, chunk: tuple[Array, ...]
    ) -> tuple[Array | None, tuple[LossSums, Array | None]]:
        sums, dlogits_NV = _chunk_sums(call, whole_EV, chunk, others)
        if not asked:
            return None, (sums, None)
        # Computed in the dtype of h: float32 products would be slow.
        dh_NE = jnp.einsum("nv,ev->ne", dlogits_NV, whole_EV)
        if dtable_EV is not None:
            dtable_EV += jnp.einsum("ne,nv->ev", chunk[0], dlogits_NV, preferred_element_type=wide)
        return dtable_EV, (sums, dh_NE)

    nothing_EV = jnp.zeros(whole_EV.shape, wide) if asked > 1 else None
    parts = split_into_chunks(call.chunk, whole_EV.shape[1], h_BSE, *others[: 2 + call.tokens])
    dtable_EV, (sums_C, dh_CNE) = scan_chunks(visit, nothing_EV, parts)
    sums = jax.tree.map(lambda each_C: psum(jnp.sum(each_C, 0), TOKENS), sums_C)
    if not asked:
        return sums, ()
    dh_BSE = merge_chunks(dh_CNE, h_BSE.shape[:2])
    if call.split:
        dh_BSE = psum_scatter(dh_BSE, mesh_axes_for("vocab"), axis=1)
    else:
        dh_BSE = psum(dh_BSE, mesh_axes_for("vocab"))
    if dtable_EV is None:
        return sums, (dh_BSE,)
    dtable_EV = psum_scatter(dtable_EV.astype(h_BSE.dtype), mesh_axes_for("embed", STORED), axis=0)
    return sums, (dh_BSE, psum(dtable_EV, REPLICA_AXES).astype(table_EV.dtype))


def _chunk_sums(
    call: _Call, table_EV: Array, chunk: tuple[Array, ...], others: tuple[Array, ...]
) -> tuple[LossSums, Float[Array, "n v"]]:
    """The sums of a chunk, and the gradient of the minimised sum with respect to its products."""
    h_NE, targets_N, weights_N, *tokens = chunk
    logits = chunk_logits(table_EV, h_NE, targets_N, call.cap, call.dtype)
    found = call.loss(logits, tuple(tokens), others[2 + call.tokens :])
    counts_N = weights_N != 0
    dlogits_NV = found.dlogits_NV
    if call.cap is not None:
        dlogits_NV *= 1 - jnp.square(logits.logits_NV / call.cap)
    dlogits_NV = jnp.where(counts_N[:, None], weights_N[:, None] * dlogits_NV, 0)

    def total(values_N: Array) -> Array:
        return jnp.sum(jnp.where(counts_N, weights_N * values_N, 0))

    sums = LossSums(total(found.loss_N), jax.tree.map(total, found.reported))
    return sums, dlogits_NV.astype(h_NE.dtype)


def inputs(split: bool) -> tuple[PartitionSpec, ...]:
    """The layouts of features, whose sequence may be `split`, and of the table."""
    h_BSE = partition("batch seq_parallel embed" if split else "batch seq embed")
    return h_BSE, partition("embed vocab", STORED)


def gathered(split: bool, h_BSE: Array, table_EV: Array) -> tuple[Array, Array]:
    """All-gathers the features along the sequence if `split`, and the table along embed."""
    h_BSE = all_gather(h_BSE, mesh_axes_for("vocab"), axis=1) if split else h_BSE
    return h_BSE, all_gather(table_EV.astype(h_BSE.dtype), mesh_axes_for("embed", STORED), axis=0)


def chunk_logits(
    table_EV: Array, h_NE: Array, targets_N: Array, cap: float | None, logits_dtype: str
) -> ChunkLogits:
    """The logits of a chunk, with statistics in float32 or wider."""
    logits_NV = logits_of_chunk(table_EV, h_NE, cap, logits_dtype)
    highest_N = pmax(jnp.max(logits_NV, axis=-1), mesh_axes_for("vocab"))
    shifted_NV = logits_NV - highest_N[:, None]
    exponentials_NV = jnp.exp(shifted_NV)
    normaliser_N = psum(jnp.sum(exponentials_NV, axis=-1), mesh_axes_for("vocab"))
    log_normaliser_N = jnp.log(normaliser_N)
    is_target_NV = targets_N[:, None] == vocabulary_ids(logits_NV)
    target_N = psum(jnp.sum(jnp.where(is_target_NV, logits_NV, 0), axis=-1), mesh_axes_for("vocab"))
    log_p_NV = shifted_NV - log_normaliser_N[:, None]
    # Reusing the summed exponentials would write them to memory in float32 for the gradient. CPUs
    # reuse them: they compute exponentials slowly, and have these in the cache.
    is_cpu = collectives.platform() == "cpu"
    p_NV = exponentials_NV / normaliser_N[:, None] if is_cpu else jnp.exp(log_p_NV)
    # Large logits cancel before anything is rounded; log_z - target would be rounded.
    cross_entropy_N = (highest_N - target_N) + log_normaliser_N
    return ChunkLogits(
        logits_NV, is_target_NV, highest_N, log_normaliser_N, log_p_NV, p_NV, cross_entropy_N
    )


def logits_of_chunk(
    table_EV: Array, h_NE: Array, cap: float | None, logits_dtype: str
) -> Float[Array, "n v"]:
    """The logits of a chunk, float32 or wider, computed in `logits_dtype` or h's if it is wider."""
    wide = jnp.promote_types(h_NE.dtype, jnp.float32)
    made_in = jnp.promote_types(logits_dtype, h_NE.dtype)
    logits_NV = jnp.einsum("ne,ev->nv", h_NE, table_EV, preferred_element_type=made_in)
    return capped(logits_NV.astype(wide), cap)


def vocabulary_ids(logits_NV: Array) -> Int32[Array, "n v"]:
    """The token id of each logit in this device's part of the vocabulary."""
    N, V = logits_NV.shape
    return jax.lax.broadcasted_iota(jnp.int32, (N, V), 1) + V * collectives.axis_index(
        mesh_axes_for("vocab")
    )


def split_into_chunks(limit: int | None, vocab: int, *tokens: Array) -> tuple[Array, ...]:
    """Splits arrays (b, s, …) into as few equal chunks (C, N, …) as `limit` allows.

    The last chunk is padded with zeros, tokens that do not count. Without a limit, a chunk's logits
    take 1 GiB in float32, or 16 MiB on CPUs, about the cache of a core. `vocab` is this device's.
    """
    held_bytes = 2**24 if collectives.platform() == "cpu" else 2**30
    limit = limit or max(1, held_bytes // (4 * vocab))
    B, S = tokens[0].shape[:2]
    count = -(-B * S // limit)
    missing = -(B * S) % count

    def part(x: Array) -> Array:
        rest = x.shape[2:]
        flat = jnp.pad(x.reshape(B * S, *rest), ((0, missing), *((0, 0) for _ in rest)))
        return flat.reshape(count, -1, *rest)

    return tuple(map(part, tokens))


def merge_chunks(x_CN: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `split_into_chunks`, for tokens of `shape`."""
    B, S = shape
    rest = x_CN.shape[2:]
    return x_CN.reshape(-1, *rest)[: B * S].reshape(B, S, *rest)


def scan_chunks(visit: Callable[..., Any], start: Any, parts: Any) -> Any:
    """`jax.lax.scan`, but without a loop for one chunk."""
    # XLA's TPU compiler would run the body of such a loop twice.
    if jax.tree.leaves(parts)[0].shape[0] > 1:
        return jax.lax.scan(visit, start, parts)
    carry, y = visit(start, jax.tree.map(lambda x: x[0], parts))
    return carry, jax.tree.map(lambda y: y[None], y)
