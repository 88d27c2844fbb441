"""Documents in blocks, each shuffled as a whole, so that a place in the stream is easy to keep.

A buffer from which random documents are drawn cannot be rebuilt without reading again all that
went through it. A block can: it is the records that follow one state of the stream.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_tools.hf_stream.texts import BadRecords, TextColumn
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
    """Texts in the order in which they are to be used; None for a record that is left out."""

    start: BlockStart
    texts: list[str | None]


@dataclass(frozen=True)
class Blocks:
    """How a stream of records is cut into blocks and shuffled.

    Attributes:
      size: documents in a block; the last one of an epoch may have fewer.
      seed: of the order in each block, which differs from block to block and epoch to epoch;
        `None` keeps the stream's order.
      repeat: whether the stream begins again after its end, for ever.
      column: where a record has its text.
      bad_records: what becomes of one without.
      what: names the stream in errors.
    """

    size: int
    seed: int | None
    repeat: bool
    column: TextColumn
    bad_records: BadRecords
    what: str

    def read(self, read_records: ReadRecords, start: BlockStart) -> Iterator[Block]:
        """The blocks from `start` on.

        Raises ValueError for a record that must not be left out, or a stream without usable ones.
        """
        while True:
            texts: list[str | None] = []
            usable = start.record > 0  # what came before may have been
            for record, state in read_records(start.records):
                texts.append(self._text(record, start.record + len(texts)))
                usable = usable or texts[-1] is not None
                if len(texts) == self.size:
                    yield Block(start, self._ordered(texts, start.block))
                    start = BlockStart(
                        state, start.epoch, start.record + self.size, start.block + 1
                    )
                    texts = []
            if texts:
                yield Block(start, self._ordered(texts, start.block))
            if not usable:  # nothing would ever come
                raise ValueError(f"{self.what} has no records with a usable text")
            if not self.repeat:
                return
            start = BlockStart(epoch=start.epoch + 1, block=start.block + bool(texts))

    def _text(self, record: object, number: int) -> str | None:
        try:
            return self.column.text(record)
        except ValueError as error:
            self.bad_records.meet(f"{self.what}, record {number} {error}")
            return None

    def _ordered(self, texts: list[str | None], block: int) -> list[str | None]:
        if self.seed is None:
            return texts
        order = permute(np.arange(len(texts)), len(texts), seed=self.seed, epoch=block)
        return [texts[index] for index in order]
