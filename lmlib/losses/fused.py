"""A loss of the logits of each token, and its gradient, summed a chunk of tokens at a time.

Logits (`lmlib.losses.logit_chunks`) are made together with the gradient: they are never kept, never
made twice, and never whole.

Shapes: B batch, S sequence, E embed, V vocab, N tokens of a chunk, C chunks.
"""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from lmlib.losses.features import is_split
from lmlib.losses.logit_chunks import (
    ChunkLogits,
    chunk_logits,
    chunks,
    gather_inputs,
    inputs,
    visited,
)
from lmlib.losses.objective import LossSums
from lmlib.parallel.collectives import on_each_device, psum, psum_scatter, psum_to_storage
from lmlib.parallel.layout import STORED, along, partition
from lmlib.parallel.mesh_axes import TOKENS

_EVERYWHERE = PartitionSpec()


class TokenLosses(NamedTuple):
    """What a `TokenLoss` says of the tokens of a chunk.

    Attributes:
      minimised_N: nats.
      reported: numbers to report, by name.
      dlogits_NV: the gradient of `minimised_N` with respect to this device's logits.
    """

    minimised_N: Float[Array, "n"]
    reported: dict[str, Float[Array, "n"]]
    dlogits_NV: Float[Array, "n v"]


@runtime_checkable
class TokenLoss(Protocol):
    """A loss of a token's logits; hashable, a frozen dataclass for example. It runs on each device,
    which has a share of the vocabulary: see `lmlib.parallel.collectives`."""

    def __call__(
        self, logits: ChunkLogits, tokens: tuple[Array, ...], tables: tuple[Array, ...]
    ) -> TokenLosses:
        """The losses of a chunk, given the chunk's part of `tokens` and the `tables` that
        `fused_loss` was given."""


class LogitSettings(NamedTuple):
    """How logits are made of features.

    Attributes:
      cap: as `Model.logit_cap`.
      chunk: tokens whose logits a device holds at a time; `None`: see
        `lmlib.losses.logit_chunks.chunks`.
      dtype: of the logits, or that of the features if it is wider; softmax is in float32 at least.
    """

    cap: float | None = None
    chunk: int | None = None
    dtype: str = "float32"


class _Call(NamedTuple):
    """What is static in a call. split: of the features' sequence. tokens, tables: how many extra
    ones there are."""

    loss: TokenLoss
    how: LogitSettings
    split: bool
    tokens: int
    tables: int

    @property
    def layouts(self) -> tuple[PartitionSpec, ...]:
        tokens, table = partition("batch seq"), partition("embed vocab")
        return (*inputs(self.split), *(tokens,) * self.tokens, *(table,) * self.tables)


def fused_loss(
    loss: TokenLoss,
    how: LogitSettings,
    h_BSE: Float[Array, "b s embed"],
    table_EV: Float[Array, "embed vocab"],
    targets_BS: Int32[Array, "b s"],
    weights_BS: Float[Array, "b s"] | Bool[Array, "b s"],
    tokens: tuple[Array, ...] = (),
    tables: tuple[Array, ...] = (),
) -> LossSums:
    """The sums over tokens of `weights_BS` times the `loss` of the logits h · table, which are
    computed in h's dtype. A token of weight 0 has no part in them, whatever its logits are.

    Layouts: the sequence of `h_BSE` whole or split over `tensor`, its gradient alike; the table as
    it is stored. Each device gathers both, the table over `fsdp`, makes the logits of its own
    tokens and its own share of the vocabulary, and a few numbers for each token travel over
    `tensor`. Asked for gradients, it computes those of a chunk along with its logits (the idea of
    Liger's fused loss: Hsu et al. 2024, arXiv:2410.10989): the backward pass only multiplies them
    by what arrives. Only h and the table have gradients.

    Args:
      tokens: further arrays (b, s, …) that `loss` needs of each token.
      tables: further arrays (embed, vocab) that it needs whole along embed.
    """
    call = _Call(loss, how, is_split(h_BSE), len(tokens), len(tables))
    arguments: tuple[Array, ...] = h_BSE, table_EV, targets_BS, weights_BS, *tokens, *tables
    if not jax.sharding.get_abstract_mesh().empty:
        arguments = tuple(map(jax.sharding.reshard, arguments, call.layouts))
    return _sums(call, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(call: _Call, *arguments: Array) -> LossSums:
    local = functools.partial(_local_sums, call)
    return on_each_device(local, call.layouts, _EVERYWHERE, tracked=False)(*arguments)


def _forward(call: _Call, *arguments: CustomVJPPrimal) -> tuple[LossSums, tuple[Array, ...]]:
    """The sums, and the gradients of features and table, of the features alone if the table is
    frozen."""
    asked = 2 if arguments[1].perturbed else 1
    local = functools.partial(_local_gradients, call, asked)
    outputs = _EVERYWHERE, call.layouts[:asked]
    on_devices = on_each_device(local, call.layouts, outputs, tracked=False)
    return on_devices(*(each.value for each in arguments))


def _backward(
    call: _Call, gradients: tuple[Array, ...], arriving: LossSums
) -> tuple[Array | None, ...]:
    factor = arriving.minimised
    if isinstance(factor, SymbolicZero):
        return (None,) * len(call.layouts)
    found = [(gradient * factor).astype(gradient.dtype) for gradient in gradients]
    return (*found, *(None,) * (len(call.layouts) - len(found)))


_sums.defvjp(_forward, _backward, symbolic_zeros=True)


def _local_sums(call: _Call, h_BSE: Array, table_EV: Array, *others: Array) -> LossSums:
    h_BSE, table_EV = gather_inputs(call.split, h_BSE, table_EV)

    def visit(nothing: None, chunk: tuple[Array, ...]) -> tuple[None, LossSums]:
        return None, _chunk_sums(call, table_EV, chunk, others)[0]

    _, sums = visited(visit, None, _parts(call, h_BSE, table_EV, others))
    return _over_batch(sums)


def _local_gradients(
    call: _Call, asked: int, h_BSE: Array, table_EV: Array, *others: Array
) -> tuple[LossSums, tuple[Array, ...]]:
    """The sums, and the first `asked` gradients of those of features and table."""
    h_BSE, whole_EV = gather_inputs(call.split, h_BSE, table_EV)
    wide = jnp.promote_types(h_BSE.dtype, jnp.float32)

    def visit(
        dtable_EV: Array | None, chunk: tuple[Array, ...]
    ) -> tuple[Array | None, tuple[LossSums, Array]]:
        sums, dlogits_NV = _chunk_sums(call, whole_EV, chunk, others)
        # In h's dtype, so that these are not float32 products.
        dh_NE = jnp.einsum("nv,ev->ne", dlogits_NV, whole_EV)
        if dtable_EV is not None:
            dtable_EV += jnp.einsum("ne,nv->ev", chunk[0], dlogits_NV, preferred_element_type=wide)
        return dtable_EV, (sums, dh_NE)

    nothing_EV = jnp.zeros(whole_EV.shape, wide) if asked > 1 else None
    parts = _parts(call, h_BSE, whole_EV, others)
    dtable_EV, (sums, dh_CNE) = visited(visit, nothing_EV, parts)
    B, S, E = h_BSE.shape
    dh_BSE = dh_CNE.reshape(-1, E)[: B * S].reshape(B, S, E)
    if call.split:
        dh_BSE = psum_scatter(dh_BSE, along("vocab"), axis=1)
    else:
        dh_BSE = psum(dh_BSE, along("vocab"))
    if dtable_EV is None:
        return _over_batch(sums), (dh_BSE,)
    dtable_EV = psum_to_storage(dtable_EV.astype(h_BSE.dtype), along("embed", STORED), axis=0)
    return _over_batch(sums), (dh_BSE, dtable_EV.astype(table_EV.dtype))


def _parts(call: _Call, h_BSE: Array, table_EV: Array, others: tuple[Array, ...]) -> Any:
    """Features, targets, weights and extra tokens, in chunks."""
    return chunks(call.how.chunk, table_EV.shape[1], h_BSE, *others[: 2 + call.tokens])


def _chunk_sums(
    call: _Call, table_EV: Array, chunk: tuple[Array, ...], others: tuple[Array, ...]
) -> tuple[LossSums, Float[Array, "n v"]]:
    """The sums of a chunk, and the gradient of what is minimised with respect to its products."""
    h_NE, targets_N, weights_N, *tokens = chunk
    logits = chunk_logits(table_EV, h_NE, targets_N, call.how.cap, call.how.dtype)
    found = call.loss(logits, tuple(tokens), others[2 + call.tokens :])
    counts_N = weights_N != 0
    dlogits_NV = found.dlogits_NV
    if call.how.cap is not None:
        dlogits_NV *= 1 - jnp.square(logits.logits_NV / call.how.cap)
    dlogits_NV = jnp.where(counts_N[:, None], weights_N[:, None] * dlogits_NV, 0)

    def total(values_N: Array) -> Array:
        return jnp.sum(jnp.where(counts_N, weights_N * values_N, 0))

    sums = LossSums(total(found.minimised_N), jax.tree.map(total, found.reported))
    return sums, dlogits_NV.astype(h_NE.dtype)


def _over_batch(sums_C: LossSums) -> LossSums:
    """The sums over all chunks, on all devices (a psum)."""
    return jax.tree.map(lambda each_C: psum(jnp.sum(each_C, 0), TOKENS), sums_C)
