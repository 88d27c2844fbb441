"""The tokens of a stream's documents, one after the other, with a position to resume from.

Documents are shuffled in blocks, each of the records that follow one state of the
stream. A shuffle buffer could not be rebuilt without reading everything before it again.

Shape suffixes: B rows, S sequence, T = S + 1 tokens of a row, N tokens of several documents.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from data_tools.hf_stream.records import SteadyRecords
from data_tools.rows.block import SkippedRows, TextField
from data_tools.tokenizer import Tokenizer
from lmlib.data.batch import Batch, packed_batch
from lmlib.data.permutation import permute
from lmlib.data.prefetch import ReadAhead

DOCUMENTS_AT_A_TIME = 64  # per call of the tokenizer
CALLS_AHEAD = 8  # of the tokenizer, ahead of the tokens' use


@dataclass(frozen=True)
class Position:
    """The position of a token; all fields are JSON values."""

    records: dict[str, Any] | None  # state of the stream at the block; None: its beginning
    epoch: int  # earlier passes over the stream
    record: int  # earlier records of this pass, before the block
    block: int  # earlier blocks, over all epochs
    document: int  # earlier documents of the block
    token: int  # earlier tokens of the document

    def __post_init__(self) -> None:
        for count in (self.epoch, self.record, self.block, self.document, self.token):
            if type(count) is not int or not 0 <= count < 2**63:
                raise TypeError(f"{count!r:.40} is not a count")


BEGINNING = Position(None, epoch=0, record=0, block=0, document=0, token=0)


class _Document(NamedTuple):
    begin: Position
    tokens_N: np.ndarray  # with framing


@dataclass(frozen=True)
class Documents:
    """The documents of a stream of records, in blocks, shuffled and tokenized."""

    records: SteadyRecords
    size: int  # documents in a block; the last one of an epoch may have fewer
    seed: int | None  # of the order in each block; None keeps the stream's order
    repeat: bool  # True restarts the stream after its end
    field: TextField
    tokenizer: Tokenizer
    skipped: SkippedRows | None  # called with records without a usable text; None: an error
    what: str  # names the stream in errors

    def read(self, start: Position) -> Iterator[list[_Document]]:
        """Yields the documents that have tokens from position `start` on.

        Raises ValueError for a bad record without `skipped`, a stream without usable ones, or a
        first document that is shorter than when the position was saved.
        """
        begun = False
        for some in self._blocks(start):
            documents = [document for document in some if len(document.tokens_N)]
            if documents and not begun and len(documents[0].tokens_N) <= start.token:
                raise ValueError(
                    f"{self.what} has changed since its state was saved: a document of more than "
                    f"{start.token} tokens has now {len(documents[0].tokens_N)}"
                )
            begun = begun or bool(documents)
            yield documents

    def _blocks(self, start: Position) -> Iterator[list[_Document]]:
        while True:
            texts: list[str | None] = []  # None for a skipped record
            usable = start.record > 0  # earlier records may have been usable
            for record, state in self.records.read(start.records):
                texts.append(self._text(record, start.record + len(texts)))
                usable = usable or texts[-1] is not None
                if len(texts) == self.size:
                    yield from self._encoded(texts, start)
                    record_number = start.record + self.size
                    start = Position(state, start.epoch, record_number, start.block + 1, 0, 0)
                    texts = []
            if texts:
                yield from self._encoded(texts, start)
            if not usable:  # the stream would never yield anything
                raise ValueError(f"{self.what} has no records with a usable text")
            if not self.repeat:
                return
            blocks = start.block + bool(texts)
            start = replace(BEGINNING, epoch=start.epoch + 1, block=blocks)

    def _text(self, record: object, number: int) -> str | None:
        row = self.field.row(record, f"{self.what}, record {number}")
        if row.text is not None:
            try:
                self.tokenizer.size(row.text)
                return row.text
            except ValueError as error:
                row = row._replace(problem=str(error))
        if self.skipped is None:
            raise ValueError(f"{row}; on_bad_row='skip' leaves such records out")
        self.skipped(None, row)
        return None

    def _encoded(self, texts: list[str | None], start: Position) -> Iterator[list[_Document]]:
        """Yields the framed documents of a block from number `start.document` on."""
        order = np.arange(len(texts))
        if self.seed is not None:
            order = permute(order, len(texts), seed=self.seed, epoch=start.block)
        begin_N, end_N = self.tokenizer.framing
        for first in range(start.document, len(texts), DOCUMENTS_AT_A_TIME):
            some = enumerate(order[first : first + DOCUMENTS_AT_A_TIME], start=first)
            usable = {number: text for number, i in some if (text := texts[i]) is not None}
            encoded = self.tokenizer.encode_batch(list(usable.values()))
            yield [
                _Document(
                    replace(start, document=number, token=0),
                    np.concatenate([begin_N, ids_N, end_N]).astype(np.int32),
                )
                for number, ids_N in zip(usable, encoded, strict=True)
            ]


class TokenStream:
    """Rows of the documents of one stream, packed without a gap.

    Row i holds tokens [i·S, i·S + S] of the framed documents in order: its last token is the first
    of the next row, across batches and epochs, so that every token except the very first is
    predicted once.
    """

    def __init__(self, documents: Documents, position: Position, first_step: int) -> None:
        """Starts reading at `position`, for the batch of `first_step`."""
        self.step = first_step - 1  # of the last batch
        self.batch: Batch | None = None
        self.position = position  # of the next row's start, in the first of `_held`, if any
        self._documents = documents
        name = f"blocks of {documents.what}"
        self._encoded = ReadAhead(documents.read(position), CALLS_AHEAD, name=name)
        self._held: deque[_Document] = deque()
        self._held_tokens = 0  # in `_held`, including the used ones of its first document

    def rows(self, count: int, sequence_length: int) -> Batch:
        """Returns the next `count` rows, padded past the end of the stream.

        Raises the error of reading or tokenizing, now and in later calls.
        """
        wanted = count * sequence_length + 1
        while self._held_tokens - self.position.token < wanted:
            coming = next(self._encoded, None)
            if coming is None:
                break
            self._held.extend(coming)
            self._held_tokens += sum(len(document.tokens_N) for document in coming)
        tokens_N = np.zeros(wanted, np.int32)
        starts_N = np.zeros(wanted, bool)
        available, offset = 0, self.position.token
        for document in self._held:
            if available == wanted:
                break
            part_N = document.tokens_N[offset : offset + wanted - available]
            tokens_N[available : available + len(part_N)] = part_N
            starts_N[available] = offset == 0
            available, offset = available + len(part_N), 0
        first_B = np.arange(count) * sequence_length
        lengths_B = np.clip(available - 1 - first_B, 0, sequence_length)
        window_BT = first_B[:, None] + np.arange(sequence_length + 1)
        self._advance(min(available, wanted - 1))
        return packed_batch(tokens_N[window_BT], starts_N[window_BT], lengths_B)

    def close(self, seconds: float = 0.0) -> None:
        """Ends the reading threads; waits at most `seconds` for each, and then abandons it."""
        self._documents.records.close(seconds)
        self._encoded.close(seconds)

    def _advance(self, count: int) -> None:
        """Advances by `count` tokens, which must be held."""
        passed = self.position.token + count
        while self._held and passed >= len(self._held[0].tokens_N):
            begin, tokens_N = self._held.popleft()
            passed -= len(tokens_N)
            self._held_tokens -= len(tokens_N)
            self.position = replace(begin, document=begin.document + 1)
        if self._held:
            self.position = replace(self._held[0].begin, token=passed)
