"""The features of a batch, from which logits are computed.

Shapes: B batch, S sequence, E embed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.models.forward_context import ForwardContext, Observe
from lmlib.models.model import Model, TrunkOutput, check_positions
from lmlib.models.part import AuxOutputs, check_like, class_name
from lmlib.parallel.axes import PartError
from lmlib.parallel.collectives import devices_along
from lmlib.parallel.layout import COMPUTE, mesh_axes_for, partition, reshard


class Features(NamedTuple):
    """The results of a model's forward pass that losses need."""

    h_BSE: Float[Array, "b s embed"]  # the input of the unembedding, in the compute dtype
    aux: AuxOutputs  # reports of the model, over all tokens except padding
    observed: Any  # the results of `observe` in each layer
    context: ForwardContext


def features(
    model: Model,
    batch: Batch,
    compute: Compute,
    key: PRNGKeyArray | None = None,
    dropout: float = 0.0,
    observe: Observe | None = None,
) -> Features:
    """Returns the features of each token of `batch`. Random layers are off without a `key`.

    Raises ValueError if rows are longer than the model has positions, or are split and a part of
    the model does not declare that it supports this.
    """
    check_positions(model, batch.tokens.shape[1])
    if batch.order != "plain":
        from lmlib.models.split_rows import check_rows_may_be_split  # only split rows need it

        devices = devices_along(mesh_axes_for("seq"))
        check_rows_may_be_split(model, f"{COMPUTE['seq']}={devices}")
    # A batch that comes directly from a source is NumPy's.
    tokens_BS, positions_BS, segment_ids_BS = (
        reshard(jnp.asarray(x_BS), "batch seq")
        for x_BS in (batch.tokens, batch.positions, batch.segment_ids)
    )
    context = ForwardContext(
        positions_BS, None if batch.whole_rows else segment_ids_BS, compute, key, dropout,
        counts_BS=segment_ids_BS > 0, order=batch.order, observe=observe,
    )  # fmt: skip
    trunk = model.trunk(tokens_BS, context)
    if not isinstance(trunk, TrunkOutput):
        raise PartError(
            f"{class_name(model)}.trunk must return a lmlib.models.model.TrunkOutput, as a `Stack` "
            f"does, got a {type(trunk).__name__}"
        )
    h_BSE = model.features(trunk.x_BSE, context)
    check_like(model, h_BSE, trunk.x_BSE)
    # The gradient, which is as large, is saved for the backward pass.
    h_BSE = checkpoint_name(h_BSE, "loss_gradient")
    return Features(h_BSE, trunk.aux, trunk.observed, context)


def is_split(h_BSE: Float[Array, "b s embed"]) -> bool:
    """True if the sequence of features is split over `tensor`; False without a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return False
    return jax.typeof(h_BSE).sharding.spec[1] == partition("batch seq_parallel embed")[1]
