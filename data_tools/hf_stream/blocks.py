"""Documents in blocks, each shuffled as a whole, so that a place in the stream is easy to keep.

A buffer from which random documents are drawn cannot be rebuilt without reading again all that
went through it. A block can: it is the records that follow one state of the stream.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_tools.hf_stream.records import text_of
from lmlib.data.permutation import permute

# Of records, each with the state after it, from a state on (`None`: from the beginning).
ReadRecords = Callable[[dict[str, Any] | None], Iterator[tuple[Any, dict[str, Any]]]]


@dataclass(frozen=True)
class BlockStart:
    """Where a block begins; everything is a JSON value."""

    records: dict[str, Any] | None = None  # state of the stream; None at its beginning
    epoch: int = 0  # passes over the stream before this one
    record: int = 0  # records of this pass before the block
    block: int = 0  # blocks before this one, over all epochs


@dataclass(frozen=True)
class Block:
    """Texts in the order in which they are to be used."""

    start: BlockStart
    texts: list[str]


@dataclass(frozen=True)
class Blocks:
    """How a stream of records is cut into blocks and shuffled.

    Attributes:
      size: documents in a block; the last one of an epoch may have fewer.
      seed: of the order in each block, which differs from block to block and epoch to epoch;
        `None` keeps the stream's order.
      repeat: whether the stream begins again after its end, for ever.
      text_column: where a record has its text.
      what: names the stream in errors.
    """

    size: int
    seed: int | None
    repeat: bool
    text_column: str
    what: str

    def read(self, read_records: ReadRecords, start: BlockStart) -> Iterator[Block]:
        """The blocks from `start` on.

        Raises ValueError for a record without text or a stream without records.
        """
        while True:
            texts: list[str] = []
            for record, state in read_records(start.records):
                where = f"{self.what}, record {start.record + len(texts)}"
                texts.append(text_of(record, self.text_column, where))
                if len(texts) == self.size:
                    yield Block(start, self._ordered(texts, start.block))
                    start = BlockStart(
                        state, start.epoch, start.record + self.size, start.block + 1
                    )
                    texts = []
            if texts:
                yield Block(start, self._ordered(texts, start.block))
            elif start.record == 0:
                raise ValueError(f"{self.what} has no records")
            if not self.repeat:
                return
            start = BlockStart(epoch=start.epoch + 1, block=start.block + bool(texts))

    def _ordered(self, texts: list[str], block: int) -> list[str]:
        if self.seed is None:
            return texts
        order = permute(np.arange(len(texts)), len(texts), seed=self.seed, epoch=block)
        return [texts[index] for index in order]
