import numpy as np
import pytest

from lmlib.data.synthetic import Synthetic


def test_every_seed_step_and_row_differs():
    rows = [
        row.tobytes()
        for seed in range(3)
        for step in range(3)
        for row in Synthetic(97, 4, 32, seed).batch(step).tokens
    ]
    assert len(set(rows)) == len(rows) == 36
    again = Synthetic(97, 4, 32, seed=0).batch(0)
    assert again.tokens[0].tobytes() == rows[0]


def test_tokens_are_noisy_arithmetic_progressions_within_documents():
    source = Synthetic(1009, 64, 256)
    batch = source.batch(0)
    assert batch.tokens.min() >= 0 and batch.tokens.max() <= source.max_token_id
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])

    stride = (batch.targets - batch.tokens) % 1009
    regular = (stride >= 1) & (stride <= 4)
    # Both tokens are free of noise with probability (15/16)**2 = 0.88.
    assert 0.85 < regular[batch.loss_mask].mean() < 0.91
    assert regular[~batch.loss_mask].mean() < 0.05
    for row in range(64):
        for segment in np.unique(batch.segment_ids[row]):
            here = (batch.segment_ids[row] == segment) & batch.loss_mask[row] & regular[row]
            strides, counts = np.unique(stride[row][here], return_counts=True)
            # Noise makes another stride look regular once in a while.
            assert len(strides) == 0 or counts.max() >= counts.sum() - 2


def test_documents_are_marked():
    batch = Synthetic(97, 64, 128).batch(1)
    assert 3 < batch.segment_ids.max(axis=1).mean() < 6
    begins = batch.positions == 0
    np.testing.assert_array_equal(np.cumsum(begins, axis=1), batch.segment_ids)
    np.testing.assert_array_equal(batch.loss_mask[:, :-1], ~begins[:, 1:])


@pytest.mark.parametrize("arguments", [(1, 1, 1), (9, 0, 1), (9, 1, 0)])
def test_settings_that_make_no_sense(arguments):
    with pytest.raises(ValueError, match="at least"):
        Synthetic(*arguments)
