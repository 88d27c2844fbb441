"""Conversations that share a row have the losses that they have alone."""

from pathlib import Path

import jax
import numpy as np
import pytest

from lmlib import llama
from lmlib.compute import Compute
from lmlib.data.flat_tokens import FlatTokens
from lmlib.data.stored.shard_writer import ShardWriter
from lmlib.losses.next_token import batch_loss

pytestmark = pytest.mark.slow


def test_the_loss_of_a_row_is_the_sum_of_those_of_its_conversations(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    writer = ShardWriter(tmp_path, "train", content="conversations", vocab_size=64)
    lengths = rng.integers(3, 30, 40)
    tokens = rng.integers(0, 64, lengths.sum())
    writer.extend(tokens, lengths, 0, loss_mask=rng.random(len(tokens)) < 0.5)
    made = writer.finish()
    model = llama(vocab=64, embed=32, layers=2, heads=2, mlp=64, key=jax.random.key(0))

    def loss(packed: bool) -> tuple[float, int, int]:
        source = FlatTokens(str(tmp_path), "train", 1, 63, packed=packed)
        total, targets = 0.0, 0
        compute = Compute(dtype="float32")
        of_batch = jax.jit(lambda batch: batch_loss(model, batch, compute)[0].minimised)
        for step in range(source.steps_per_epoch):
            batch = source.batch(step)
            total += float(of_batch(batch))
            targets += int(batch.loss_mask.sum())
        return total, targets, source.sequences

    (together, targets, rows), (alone, targets_alone, documents) = loss(True), loss(False)
    assert targets == targets_alone == made.targets
    assert rows < documents == 40
    np.testing.assert_allclose(together, alone, rtol=1e-5)
