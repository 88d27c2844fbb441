"""What a model makes of one sequence: logits, losses, activations, attention.

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
from lmlib.parallel.layout import COMPUTE, pieces, reshard
from lmlib.parallel.mesh import mesh_of

_LENGTHS = 64  # programs are compiled for multiples of so many tokens

Look = Callable[[Model, Batch, Compute], Array]  # rows first


class Inspector:
    """Looks into one model. Every result is a float32 NumPy array, and follows from the tokens
    alone: not from the mesh, but for rounding. Where there are several processes all must ask.

    Args:
      model: a `lmlib.models.model.Model`.
      compute: how to compute it; in which dtype above all.
      mesh: where its weights lie; `None`: that which they were made on, if any.
      longest: tokens that the model was trained on; shorter sequences are padded up to it at most.
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
        """Of the token after each of `ids`.

        Raises:
          ValueError: if there is no token, one is not the model's, or there are too many.
        """
        return self._seen(_logits, ids)[: len(ids)]

    def token_losses(self, ids: Sequence[int]) -> Float[np.ndarray, "targets"]:
        """-log p of each token but the first, given those before it, in nats.

        Raises:
          ValueError: as `logits`.
        """
        return self._seen(_losses, ids)[: len(ids) - 1]

    def activations(self, ids: Sequence[int]) -> Float[np.ndarray, "depth s embed"]:
        """The residual stream: before the first layer, then after each. The model's last norm comes
        after the last.

        Raises:
          ValueError: as `logits`, or if the model shows nothing of its layers.
        """
        return self._seen(residual_stream, ids)[:, : len(ids)]

    def logit_lens(self, ids: Sequence[int]) -> Float[np.ndarray, "depth s vocab"]:
        """The logits that the model would give of each of `activations`, if its layers ended there:
        the last ones are `logits` (nostalgebraist 2020, "interpreting GPT: the logit lens"). The
        array has 4 bytes for each depth, token and id of the vocabulary, on every device.

        Raises:
          ValueError: as `activations`.
        """
        return self._seen(logit_lens, ids)[:, : len(ids)]

    def attention(self, ids: Sequence[int]) -> Float[np.ndarray, "layers heads s t"]:
        """How much each token (s) takes from each (t): not less than 0, nothing from later ones,
        1 in all. The array has 4 bytes for each layer, head, s and t, on every device.

        Raises:
          ValueError: as `activations`, or if a layer has no attention weights.
        """
        return self._seen(attention_weights, ids)[:, :, : len(ids), : len(ids)]

    def _seen(self, look: Look, ids: Sequence[int]) -> np.ndarray:
        batch = self._batch(ids)
        on_mesh = contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)
        with on_mesh:
            return np.asarray(_first_row(self._model, batch, self._compute, look))

    def _batch(self, ids: Sequence[int]) -> Batch:
        """`ids` in the first row; the others are there for the mesh, and what follows `ids` lest
        every length be compiled."""
        if len(ids) == 0:
            raise ValueError("there are no tokens: give one at least")
        if wrong := [id for id in ids if not 0 <= id < self._model.vocab]:
            raise ValueError(
                f"the model has no token {wrong[0]}: its ids end at {self._model.vocab - 1}"
            )
        padded = padded_length(self._model, len(ids), _LENGTHS)
        length = max(len(ids), min(padded, self._longest or padded))
        check_length(self._model, length, self._compute)
        rows = 1 if self._mesh is None else pieces(COMPUTE["batch"], self._mesh)
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
    """On every device."""
    everywhere = None if jax.sharding.get_abstract_mesh().empty else PartitionSpec()
    first = jnp.zeros(1, jnp.int32)  # as an array: rows may lie apart
    return look(model, batch, compute).at[first].get(out_sharding=everywhere)[0].astype(jnp.float32)


def _logits(model: Model, batch: Batch, compute: Compute) -> Float[Array, "b s vocab"]:
    h_BSE = features(model, batch, compute).h_BSE
    return model.logits(reshard(h_BSE, "batch seq embed"), compute)


def _losses(model: Model, batch: Batch, compute: Compute) -> Float[Array, "b s"]:
    return token_losses(model, batch, compute)[0]
