"""Loss over validation batches, every token counted once."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from lmlib.data.batch import Batch
from lmlib.losses import batch_loss


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`loss` is in nats per valid target token; `tokens` counts those."""

    loss: float
    tokens: int

    def bits_per_byte(self, bytes_per_target: float) -> float:
        """The loss as bits for each byte of text; comparable across tokenizers."""
        return self.loss / math.log(2) / bytes_per_target


def evaluation_step(model: Any, batch: Batch) -> tuple[Array, Array]:
    """Sum of the cross-entropy, nats, and count of the valid target tokens of one batch."""
    return batch_loss(model, batch).cross_entropy, jnp.sum(batch.loss_mask, dtype=jnp.int32)


def evaluate(
    compiled_step: Callable[[Any, Batch], tuple[Array, Array]], model: Any, batches: Iterable[Batch]
) -> Evaluation:
    """Evaluates `model` on `batches` with the compiled `evaluation_step`.

    Raises:
      ValueError: if no target token is valid.
    """
    sums = [compiled_step(model, batch) for batch in batches]
    # Read once at the end, so that batches queue up on the devices; summed in float64.
    losses, counts = zip(*jax.device_get(sums), strict=True)
    tokens = sum(int(count) for count in counts)
    if tokens == 0:
        raise ValueError("the validation batches have no target token: every position is masked")
    return Evaluation(sum(float(loss) for loss in losses) / tokens, tokens)
