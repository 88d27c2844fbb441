"""Documents in blocks, each shuffled as a whole, so that a place in the stream is easy to keep.

For `HFStream`. A buffer from which random documents are drawn cannot be rebuilt without reading
again all that went through it. A block can: it is the records that follow one state of the stream.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_tools.encoders.encoder import Encoder
from data_tools.rows.block import SkippedRows, TextField
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
      field: the text of a record.
      encoder: of the texts, which judges whether it can take one.
      skipped: is called with records without a usable text; None: they are errors.
      what: names the stream in errors.
    """

    size: int
    seed: int | None
    repeat: bool
    field: TextField
    encoder: Encoder
    skipped: SkippedRows | None
    what: str

    def read(self, read_records: ReadRecords, start: BlockStart) -> Iterator[Block]:
        """The blocks from `start` on.

        Raises ValueError for a bad record without `skipped`, or a stream without usable ones.
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
        row = self.field.row(record, f"{self.what}, record {number}")
        if row.text is not None:
            try:
                self.encoder.size(row.text)
                return row.text
            except ValueError as error:
                row = row._replace(problem=str(error))
        if self.skipped is None:
            raise ValueError(f"{row}; on_bad_row='skip' leaves such records out")
        self.skipped(None, row)
        return None

    def _ordered(self, texts: list[str | None], block: int) -> list[str | None]:
        if self.seed is None:
            return texts
        order = permute(np.arange(len(texts)), len(texts), seed=self.seed, epoch=block)
        return [texts[index] for index in order]
