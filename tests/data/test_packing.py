import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlib.data.packing import packed_batch


@settings(max_examples=100)
@given(data=st.data(), rows=st.integers(0, 3), length=st.integers(1, 9))
def test_matches_a_loop(data: st.DataObject, rows: int, length: int) -> None:
    flags = st.lists(st.booleans(), min_size=length + 1, max_size=length + 1)
    starts = np.array([data.draw(flags) for _ in range(rows)], bool).reshape(rows, length + 1)
    lengths = np.array([data.draw(st.integers(0, length)) for _ in range(rows)], int)
    tokens = 1 + np.arange(rows * (length + 1)).reshape(rows, length + 1)
    batch = packed_batch(tokens, starts, lengths)

    for b in range(rows):
        segment, position = 1, 0
        for s in range(length):
            if s > 0 and starts[b, s]:
                segment, position = segment + 1, 0
            if s < lengths[b]:
                expected = tokens[b, s], tokens[b, s + 1], segment, position, not starts[b, s + 1]
            else:
                expected = 0, 0, 0, 0, False
            assert (
                batch.tokens[b, s],
                batch.targets[b, s],
                batch.segment_ids[b, s],
                batch.positions[b, s],
                batch.loss_mask[b, s],
            ) == expected
            position += 1
