"""What is minimised: sums over tokens, so that any split of a batch adds up to the same.

Logits are made a chunk of tokens at a time (`lmlib.logit_chunks`), together with their gradients:
they are never kept, never made twice, and never whole.

Shapes: B batch, S sequence, E embed, V vocab, N tokens of a chunk, C chunks.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.logit_chunks import chunk_logits, chunks, gathered, inputs, visited
from lmlib.models.protocol import Context, Model
from lmlib.parallel.layout import COMPUTE
from lmlib.parallel.local import on_each_device, psum, psum_scatter

_EVERYWHERE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised besides the cross-entropy, and how it is regularised.

    Args:
      z_loss: weight of log²(Σ exp logits), which keeps the normaliser near one (PaLM: Chowdhery et
        al. 2022, arXiv:2204.02311, §5); 0 for none.
      dropout: rate at which the embedded tokens, and what attention and mlp add to the residual
        stream, are dropped in training.

    Raises:
      ValueError: if `z_loss` is negative, or `dropout` is not in [0, 1).
    """

    z_loss: float = 0.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if not self.z_loss >= 0:
            raise ValueError(f"z_loss must not be negative, got {self.z_loss}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")


CROSS_ENTROPY = Objective()


class LossSums(NamedTuple):
    """Sums over the valid target tokens of a batch or of a part of one.

    minimised: -log p(target) + z_loss · log²(Σ exp logits), and the model's own losses, in nats.
    cross_entropy: -log p(target), in nats; a number to report, which has no gradient.
    """

    minimised: Float[Array, ""]
    cross_entropy: Float[Array, ""]


class LossSettings(NamedTuple):
    """How the loss of features is computed.

    z_loss: as of `Objective`.
    cap: as `Model.logit_cap`.
    chunk: tokens whose logits a device holds at a time; `None`: see `lmlib.logit_chunks.chunks`.
    logits_dtype: of the logits, or that of the features if it is wider; softmax is in float32 at
      least.
    """

    z_loss: float = 0.0
    cap: float | None = None
    chunk: int | None = None
    logits_dtype: str = "float32"


def batch_loss(
    model: Model,
    batch: Batch,
    compute: Compute,
    objective: Objective = CROSS_ENTROPY,
    key: PRNGKeyArray | None = None,
    observe: Callable[[Array], Any] | None = None,
) -> tuple[LossSums, Any]:
    """Loss of the next token, summed over `batch.loss_mask`, and what `observe` made of the
    residual stream (`Context.observe`).

    Args:
      key: of random layers, which are off without one.
    """
    # Straight from a source, a batch is NumPy's.
    tokens_BS, positions_BS, segment_ids_BS, targets_BS, loss_mask_BS = map(
        jnp.asarray,
        (batch.tokens, batch.positions, batch.segment_ids, batch.targets, batch.loss_mask),
    )
    context = Context(
        positions_BS, segment_ids_BS, compute, key, objective.dropout, observe=observe
    )
    trunk = model.trunk(tokens_BS, context)
    # What is kept for the backward pass is the gradient of these, which is as large.
    h_BSE = checkpoint_name(model.features(trunk.x_BSE, context), "loss_gradient")
    settings = LossSettings(
        objective.z_loss, model.logit_cap, compute.loss_chunk, compute.logits_dtype
    )
    with jax.named_scope("loss"):
        sums = loss_sums(settings, h_BSE, model.unembedding_EV, targets_BS, loss_mask_BS)
    minimised = sum(trunk.losses.values(), sums.minimised)
    return sums._replace(minimised=minimised), trunk.observed


def loss_sums(
    settings: LossSettings,
    h_BSE: Float[Array, "b s embed"],
    table_EV: Float[Array, "embed vocab"],
    targets_BS: Int32[Array, "b s"],
    loss_mask_BS: Bool[Array, "b s"],
) -> LossSums:
    """The loss of the logits h · table, computed in h's dtype.

    Layouts: the sequence of `h_BSE` whole or split over `tensor`, its gradient alike; the table as
    it is stored. Each device gathers both, the table over `fsdp`, makes the logits of its own
    tokens and its own share of the vocabulary, and a few numbers for each token travel over
    `tensor`. Asked for gradients, it computes those of a chunk along with its logits (the idea of
    Liger's fused loss: Hsu et al. 2024, arXiv:2410.10989): the backward pass only multiplies them
    by what arrives.
    """
    arguments = h_BSE, table_EV, targets_BS, loss_mask_BS
    if jax.sharding.get_abstract_mesh().empty:
        return _loss_sums(settings, False, *arguments)
    split = jax.typeof(h_BSE).sharding.spec[1] == COMPUTE["seq_parallel"]
    return _loss_sums(settings, split, *map(jax.sharding.reshard, arguments, inputs(split)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss_sums(settings: LossSettings, split: bool, *arguments: Array) -> LossSums:
    sums = functools.partial(_local_sums, settings, split)
    return on_each_device(sums, inputs(split), _EVERYWHERE, tracked=False)(*arguments)


def _forward(
    settings: LossSettings, split: bool, *arguments: Array
) -> tuple[LossSums, tuple[Array, Array]]:
    gradients = functools.partial(_local_gradients, settings, split)
    layouts = inputs(split)
    outputs = _EVERYWHERE, layouts[:2]
    return on_each_device(gradients, layouts, outputs, tracked=False)(*arguments)


def _backward(
    settings: LossSettings, split: bool, gradients: tuple[Array, Array], arriving: LossSums
) -> tuple[Array, Array, None, None]:
    dh_BSE, dtable_EV = gradients
    return (
        (dh_BSE * arriving.minimised).astype(dh_BSE.dtype),
        dtable_EV * arriving.minimised,
        None,
        None,
    )


_loss_sums.defvjp(_forward, _backward)


def _local_sums(
    settings: LossSettings,
    split: bool,
    h_BSE: Array,
    table_EV: Array,
    targets_BS: Array,
    loss_mask_BS: Array,
) -> LossSums:
    h_BSE, table_EV = gathered(split, h_BSE, table_EV)

    def visit(sums: LossSums, chunk: tuple[Array, Array, Array]) -> tuple[LossSums, None]:
        return _added(sums, _chunk_sums(settings, table_EV, *chunk)[0]), None

    parts = chunks(settings.chunk, table_EV.shape[1], h_BSE, targets_BS, loss_mask_BS)
    sums, _ = visited(visit, _no_sums(h_BSE), parts)
    return _over_batch(sums)


def _local_gradients(
    settings: LossSettings,
    split: bool,
    h_BSE: Array,
    table_EV: Array,
    targets_BS: Array,
    loss_mask_BS: Array,
) -> tuple[LossSums, tuple[Array, Array]]:
    h_BSE, whole_EV = gathered(split, h_BSE, table_EV)
    wide = jnp.promote_types(h_BSE.dtype, jnp.float32)

    def visit(
        carry: tuple[LossSums, Array], chunk: tuple[Array, Array, Array]
    ) -> tuple[tuple[LossSums, Array], Array]:
        sums, dtable_EV = carry
        chunk_sums, dlogits_NV = _chunk_sums(settings, whole_EV, *chunk)
        # In h's dtype, so that these are not float32 products.
        dh_NE = jnp.einsum("nv,ev->ne", dlogits_NV, whole_EV)
        dtable_EV += jnp.einsum("ne,nv->ev", chunk[0], dlogits_NV, preferred_element_type=wide)
        return (_added(sums, chunk_sums), dtable_EV), dh_NE

    parts = chunks(settings.chunk, whole_EV.shape[1], h_BSE, targets_BS, loss_mask_BS)
    nothing = _no_sums(h_BSE), jnp.zeros(whole_EV.shape, wide)
    (sums, dtable_EV), dh_CNE = visited(visit, nothing, parts)
    B, S, E = h_BSE.shape
    dh_BSE = dh_CNE.reshape(-1, E)[: B * S].reshape(B, S, E)
    dh_BSE = psum_scatter(dh_BSE, "tensor", axis=1) if split else psum(dh_BSE, "tensor")
    dtable_EV = psum_scatter(dtable_EV.astype(h_BSE.dtype), "fsdp", axis=0)
    return _over_batch(sums), (dh_BSE, psum(dtable_EV, "data").astype(table_EV.dtype))


def _chunk_sums(
    settings: LossSettings, table_EV: Array, h_NE: Array, targets_N: Array, loss_mask_N: Array
) -> tuple[LossSums, Float[Array, "n v"]]:
    """The sums of a chunk, and the gradient of what is minimised with respect to its logits."""
    chunk = chunk_logits(table_EV, h_NE, targets_N, settings.cap, settings.logits_dtype)
    log_z_N = chunk.highest_N + jnp.log(chunk.normaliser_N)
    cross_entropy = jnp.sum(jnp.where(loss_mask_N, chunk.cross_entropy_N, 0))
    z = jnp.sum(jnp.where(loss_mask_N, jnp.square(log_z_N), 0))
    # d log_z / d logit is its probability.
    slope_N = (1 + 2 * settings.z_loss * log_z_N) / chunk.normaliser_N
    dlogits_NV = chunk.exponentials_NV * slope_N[:, None] - chunk.is_target_NV
    if settings.cap is not None:
        dlogits_NV *= 1 - jnp.square(chunk.logits_NV / settings.cap)
    dlogits_NV = jnp.where(loss_mask_N[:, None], dlogits_NV, 0).astype(h_NE.dtype)
    return LossSums(cross_entropy + settings.z_loss * z, cross_entropy), dlogits_NV


def _no_sums(h_BSE: Array) -> LossSums:
    nothing = jnp.zeros((), jnp.promote_types(h_BSE.dtype, jnp.float32))
    return LossSums(nothing, nothing)


def _added(one: LossSums, other: LossSums) -> LossSums:
    return LossSums(*(a + b for a, b in zip(one, other, strict=True)))


def _over_batch(sums: LossSums) -> LossSums:
    """The sums over the parts of the batch on all devices (a psum)."""
    return LossSums(*(psum(each, COMPUTE["batch"]) for each in sums))
