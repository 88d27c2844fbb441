"""Loss over validation batches, every token counted once."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from lmlib.compute import Compute
from lmlib.data.batch import Batch, Source
from lmlib.data.prefetch import Prefetch
from lmlib.losses import batch_loss
from lmlib.models.protocol import Model
from lmlib.parallel.layout import partition


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`loss` is in nats per valid target token; `tokens` counts those."""

    loss: float
    tokens: int

    def bits_per_byte(self, bytes_per_target: float) -> float:
        """The loss as bits for each byte of text; comparable across tokenizers."""
        return self.loss / math.log(2) / bytes_per_target


def evaluation_step(model: Model, batch: Batch, compute: Compute) -> tuple[Array, Array]:
    """Sum of the cross-entropy, nats, and count of the valid target tokens of one batch."""
    sums, _ = batch_loss(model, batch, compute)
    return sums.reported["loss"], jnp.sum(batch.loss_mask, dtype=jnp.int32)


class Evaluator:
    """Evaluates models on the first batches of sources, always the same ones.

    Two batches are on their way at a time: the devices never wait, and no more of them is held than
    that. XLA's CPU client lets 32 programs wait; one more blocks the thread that starts it, which
    may be the thread that another device needs, and simulated devices then wait for each other
    until XLA aborts.
    """

    def __init__(self, mesh: Mesh, compute: Compute):
        self._mesh = mesh
        everywhere = NamedSharding(mesh, PartitionSpec())
        step = functools.partial(evaluation_step, compute=compute)
        self._step = jax.jit(step, out_shardings=(everywhere, everywhere))

    def __call__(self, model: Model, source: Source, batches: int) -> Evaluation:
        """The loss of `model` over the first `batches` batches of `source`.

        Raises:
          ValueError: if no target token in them is valid.
        """
        rows = NamedSharding(self._mesh, partition("batch seq"))
        with jax.set_mesh(self._mesh), Prefetch(source, rows, 0, batches) as placed:
            sums: list[tuple[Array, Array]] = []
            for _, batch in placed:
                sums.append(self._step(model, batch))
                jax.block_until_ready(sums[-2:][0])
        # Summed in float64.
        losses, counts = zip(*jax.device_get(sums), strict=True)
        tokens = sum(int(count) for count in counts)
        if tokens == 0:
            raise ValueError("the validation batches have no target: every position is masked")
        return Evaluation(sum(float(loss) for loss in losses) / tokens, tokens)
