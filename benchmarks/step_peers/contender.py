"""What every contender of the comparison is given, and what it must do.

Shapes: B batch, S sequence, E embed, H heads, K kv_heads, D head_dim, F mlp, V vocab, L layers.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import numpy as np

from lmlib.data.batch import Batch
from lmlib.data.synthetic import Synthetic
from lmlib.models.decoder import Decoder
from step_peers.sizes import AdamW, Size

Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Work:
    """One size in one precision: the same weights, batches and numbers for all.

    `precision` is the dtype of activations, and of weights where they are multiplied. Weights,
    gradients that reach the optimizer, and its moments are float32 in any case. A row is one
    document, or if `packed` several, which attention keeps apart. With `muon` lmlib's step has Muon
    in AdamW's place.
    """

    size: Size
    precision: str
    steps: int
    packed: bool = False
    muon: bool = False

    @property
    def adamw(self) -> AdamW:
        return self.size.adamw

    @functools.cached_property
    def weights(self) -> Weights:
        return named_weights(jax.jit(self.size.make_model)())

    @functools.cached_property
    def batches(self) -> list[Batch]:
        size = self.size
        source = Synthetic(size.settings["vocab"], size.batch, size.sequence)
        batches = [source.batch(step) for step in range(self.steps)]
        return batches if self.packed else list(map(one_document_rows, batches))


class Contender(Protocol):
    """A compiled, or about to be compiled, training step and its state."""

    def run(self, steps: range) -> list[float]:
        """Makes these steps, each with its own batch, and waits for the device.

        Returns the loss of each, in nats per token, before its update.
        """

    def peak_bytes(self) -> int | None:
        """The device memory that the step needs at its peak, state included; None if unknown."""


def named_weights(model: Decoder) -> Weights:
    """The model's weights, float32 in host memory, under the names and in the shapes that the
    peers read: those of layers stacked, as embedding VE, unembedding EV, norm E, attention_norm LE,
    query LEHD, key LEKD, value LEKD, output LHDE, mlp_norm LE, gate LEF, up LEF, down LFE."""
    ((block,),) = model.stack.patterns
    attention, mlp = block.attention, block.mlp
    return jax.device_get(
        {
            "embedding": model.embedding,
            "unembedding": model.unembedding,
            "norm": model.norm.scale,
            "attention_norm": block.attention_norm.scale,
            "query": attention.query,
            "key": attention.key,
            "value": attention.value,
            "output": attention.output,
            "mlp_norm": block.mlp_norm.scale,
            "gate": mlp.gate,
            "up": mlp.up,
            "down": mlp.down,
        }
    )


def one_document_rows(batch_BS: Batch) -> Batch:
    """The tokens of a batch, each row one document in which every target counts, so that no
    contender needs a mask besides the causal one."""
    rows, sequence = batch_BS.tokens.shape
    return Batch(
        tokens=batch_BS.tokens,
        targets=batch_BS.targets,
        segment_ids=np.ones_like(batch_BS.segment_ids),
        positions=np.tile(np.arange(sequence, dtype=np.int32), (rows, 1)),
        loss_mask=np.ones_like(batch_BS.loss_mask),
        whole_rows=True,
    )
