"""A model's results for one sequence: logits, losses, activations, attention.

Shapes: B batch, S sequence (queries), T sequence (keys), L layers, E embed, H heads, V vocab.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.inspect.layers import attention_weights, logit_lens, residual_stream
from lmlib.losses.features import features
from lmlib.losses.token_losses import token_losses
from lmlib.models.model import Model, check_length, padded_length
from lmlib.parallel.layout import COMPUTE, num_shards, reshard
from lmlib.parallel.mesh import mesh_of

_LENGTHS = 64  # sequences are padded to multiples of this, to limit compilations

Look = Callable[[Model, Batch, Compute], Array]  # rows first


class Inspector:
    """Runs one model on single sequences. Every result is a float32 NumPy array.

    Results depend only on the tokens: the mesh changes them only by rounding. If there are several
    processes, all must make the same calls. Methods raise ValueError if there are no tokens or too
    many, an id is not in the vocabulary, or the model does not expose its layers.

    Args:
      model: a `lmlib.models.model.Model`.
      compute: compute settings, above all the dtype.
      mesh: the mesh of its weights; `None` takes the mesh on which they were made, if any.
      longest: the sequence length in training; shorter sequences are padded at most to this.
    """

    def __init__(
        self,
        model: Model,
        compute: Compute = Compute(dtype="float32"),
        mesh: Mesh | None = None,
        longest: int | None = None,
    ):
        self._model, self._compute, self._longest = model, compute, longest
        self._mesh = mesh or mesh_of(model)

    def logits(self, ids: Sequence[int]) -> Float[np.ndarray, "s vocab"]:
        """Returns the logits of the token after each of `ids`."""
        return self._seen(_logits, ids)[: len(ids)]

    def token_losses(self, ids: Sequence[int]) -> Float[np.ndarray, "targets"]:
        """Returns -log p of each token except the first, given the tokens before it, in nats."""
        return self._seen(_losses, ids)[: len(ids) - 1]

    def activations(self, ids: Sequence[int]) -> Float[np.ndarray, "depth s embed"]:
        """Returns the residual stream before the final norm: before the first layer, after each."""
        return self._seen(residual_stream, ids)[:, : len(ids)]

    def logit_lens(self, ids: Sequence[int]) -> Float[np.ndarray, "depth s vocab"]:
        """Returns the logits that the model would compute from each of `activations`.

        The last ones equal `logits` (nostalgebraist 2020, "interpreting GPT: the logit lens"). The
        whole array is on every device.
        """
        return self._seen(logit_lens, ids)[:, : len(ids)]

    def attention(self, ids: Sequence[int]) -> Float[np.ndarray, "layers heads s t"]:
        """Returns the weights with which each query (s) attends to each key (t).

        They are non-negative, zero for later keys, and sum to 1 over t. The whole array is on every
        device. Raises ValueError if a layer has no attention weights.
        """
        return self._seen(attention_weights, ids)[:, :, : len(ids), : len(ids)]

    def _seen(self, look: Look, ids: Sequence[int]) -> np.ndarray:
        batch = self._batch(ids)
        with contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            return np.asarray(_first_row(self._model, batch, self._compute, look))

    def _batch(self, ids: Sequence[int]) -> Batch:
        """Puts `ids`, padded, in the first row of a batch; other rows fill the mesh."""
        if len(ids) == 0:
            raise ValueError("there are no tokens: give at least one")
        if wrong := [id for id in ids if not 0 <= id < self._model.vocab]:
            raise ValueError(
                f"the model has no token {wrong[0]}: its ids end at {self._model.vocab - 1}"
            )
        padded = padded_length(self._model, len(ids), _LENGTHS)
        length = max(len(ids), min(padded, self._longest or padded))
        check_length(self._model, length, self._compute)
        rows = 1 if self._mesh is None else num_shards(COMPUTE["batch"], self._mesh)
        tokens_BS = np.zeros((rows, length), np.int32)
        tokens_BS[0, : len(ids)] = ids
        given_BS = np.zeros((rows, length), bool)
        given_BS[0, : len(ids)] = True
        return Batch(
            tokens=tokens_BS,
            targets=np.roll(tokens_BS, -1, axis=1),
            segment_ids=given_BS.astype(np.int32),
            positions=np.where(given_BS, np.arange(length), 0).astype(np.int32),
            loss_mask=given_BS,
        )


@functools.partial(jax.jit, static_argnums=(2, 3))
def _first_row(model: Model, batch: Batch, compute: Compute, look: Look) -> Array:
    """Returns the first row of the result, on every device."""
    everywhere = None if jax.sharding.get_abstract_mesh().empty else PartitionSpec()
    first = jnp.zeros(1, jnp.int32)  # an array, since rows may be on different devices
    return look(model, batch, compute).at[first].get(out_sharding=everywhere)[0].astype(jnp.float32)


def _logits(model: Model, batch: Batch, compute: Compute) -> Float[Array, "b s vocab"]:
    h_BSE = features(model, batch, compute).h_BSE
    return model.logits(reshard(h_BSE, "batch seq embed"), compute)


def _losses(model: Model, batch: Batch, compute: Compute) -> Float[Array, "b s"]:
    return token_losses(model, batch, compute)[0]
