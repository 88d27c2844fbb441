"""Sources whose tokens tell which sequence they are."""

from collections import defaultdict
from typing import Any

import numpy as np

from lmlib.data.batch import Batch, Source
from lmlib.data.stored.metadata import TokenizerIdentity

NUMBER = 10**7  # more sequences than any test takes from a source


class Numbered:
    """Sequence k of source `code` is the token code·NUMBER + k; remembers the sequences read."""

    def __init__(
        self,
        code: int = 0,
        batch_size: int = 4,
        sequence_length: int = 1,
        batches: int | None = None,
        tokenizer: TokenizerIdentity | None = None,
    ) -> None:
        self.code = code
        self.batch_size, self.sequence_length = batch_size, sequence_length
        self.max_token_id = (code + 1) * NUMBER - 1
        self.batches, self.bytes_per_target, self.tokenizer = batches, None, tokenizer
        self.reads: list[list[int]] = []  # sequence numbers, call by call

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        number_B = step * self.batch_size + np.arange(self.batch_size)[rows]
        self.reads.append(number_B.tolist())
        token_BS = np.repeat(self.code * NUMBER + number_B[:, None], self.sequence_length, 1)
        token_BS = token_BS.astype(np.int32)
        return Batch(token_BS, token_BS + 1, token_BS + 2, token_BS + 3, token_BS % 2 == 0)


class Stream(Numbered):
    """A source with a state."""

    def state(self, step: int) -> dict[str, Any]:
        return {}

    def restore(self, step: int, states: list[dict[str, Any]]) -> None:
        pass


def remember_rows(source: Source) -> dict[int, list[int]]:
    """Makes `source` remember the rows that are read, by step."""
    read, batch = defaultdict[int, list[int]](list), source.batch

    def remembered(step: int, rows: slice = slice(None)) -> Batch:
        read[step] += range(source.batch_size)[rows]
        return batch(step, rows)

    source.batch = remembered
    return read
