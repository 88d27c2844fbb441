"""The tokens of a stream's documents, one after the other, and a place among them to go on from.

For `HFStream`.

Shape suffixes: B rows, S sequence, T = S + 1 tokens of a row, N tokens of several documents.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from data_tools.hf_stream.blocks import Block, Blocks, BlockStart
from data_tools.hf_stream.records import SteadyRecords
from data_tools.tokenizer import Tokenizer
from lmlib.data.batch import Batch
from lmlib.data.packing import packed_batch
from lmlib.data.prefetch import ReadAhead

DOCUMENTS_AT_A_TIME = 64  # given to the tokenizer
CALLS_AHEAD = 8  # of the tokenizer, made before their tokens are needed


@dataclass(frozen=True)
class Position:
    """The place of a token; everything is a JSON value."""

    block: BlockStart = field(default_factory=BlockStart)
    document: int = 0  # documents of the block before it
    token: int = 0  # tokens of the document before it

    def as_json(self) -> dict[str, Any]:
        """The input of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, entries: dict[str, Any]) -> "Position":
        """Raises TypeError or KeyError for entries that are no position."""
        found = cls(BlockStart(**entries["block"]), entries["document"], entries["token"])
        start = found.block
        counts = (start.epoch, start.record, start.block, found.document, found.token)
        for count in counts:
            if type(count) is not int or not 0 <= count < 2**63:
                raise TypeError(f"{count!r:.40} is no count")
        return found


class _Document(NamedTuple):
    block: BlockStart
    number: int  # in the block's order
    tokens_N: np.ndarray  # with framing


class TokenStream:
    """Rows of the documents of one stream, packed without a gap.

    Row i holds tokens [i·S, i·S + S] of the framed documents in their order: its last token is
    the first of the next row, across batches and epochs, so that every token but the very first
    is predicted once.
    """

    def __init__(
        self,
        records: SteadyRecords,
        blocks: Blocks,
        tokenizer: Tokenizer,
        pool: ThreadPoolExecutor,
        position: Position,
    ) -> None:
        """Starts reading at `position`; the tokenizer runs in `pool`."""
        self._what = blocks.what
        self._records = records
        read = blocks.read(records.read, position.block)
        encoded = _encoded(read, position.document, partial(_framed, tokenizer), pool)
        self._encoded = ReadAhead(encoded, CALLS_AHEAD, name=f"blocks of {blocks.what}")
        self._failure: Exception | None = None
        self._held: deque[_Document] = deque()
        self._held_tokens = 0  # in `_held`, used-up ones of its first document included
        self._position = position  # of a token in the first of `_held`, if that has any

    @property
    def position(self) -> Position:
        """Where the next row begins."""
        return self._position

    def rows(self, count: int, sequence_length: int) -> Batch:
        """The next `count` rows, padded past the end of the stream.

        Raises the error of reading or tokenizing, now and whenever it is called again.
        """
        wanted = count * sequence_length + 1
        tokens_N, starts_N, available = self._peek(wanted)
        first_B = np.arange(count) * sequence_length
        lengths_B = np.clip(available - 1 - first_B, 0, sequence_length)
        window_BT = first_B[:, None] + np.arange(sequence_length + 1)
        self._advance(min(available, wanted - 1))
        return packed_batch(tokens_N[window_BT], starts_N[window_BT], lengths_B)

    def close(self, seconds: float = 0.0) -> None:
        """Ends the threads that read; waits for each so long at most, and then abandons it."""
        self._records.close(seconds)
        self._encoded.close(seconds)

    def _hold(self, wanted: int) -> None:
        """Holds at least `wanted` tokens from the position on, or all there are."""
        if self._failure is not None:
            raise self._failure
        try:
            while self._held_tokens - self._position.token < wanted:
                documents = next(self._encoded, None)
                if documents is None:
                    return
                used = [document for document in documents.result() if len(document.tokens_N)]
                if not self._held and used and len(used[0].tokens_N) <= self._position.token:
                    raise ValueError(
                        f"{self._what} has changed since its state was saved: a document of more "
                        f"than {self._position.token} tokens has now {len(used[0].tokens_N)}"
                    )
                self._held.extend(used)
                self._held_tokens += sum(len(document.tokens_N) for document in used)
        except Exception as error:
            self._failure = error  # the place of the failure is lost: nothing may follow
            raise

    def _peek(self, wanted: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The next tokens, whether each is the first of a document, and how many there are.

        Zeros follow those.
        """
        self._hold(wanted)
        tokens_N = np.zeros(wanted, np.int32)
        starts_N = np.zeros(wanted, bool)
        filled, offset = 0, self._position.token
        for document in self._held:
            if filled == wanted:
                break
            part_N = document.tokens_N[offset : offset + wanted - filled]
            tokens_N[filled : filled + len(part_N)] = part_N
            starts_N[filled] = offset == 0
            filled, offset = filled + len(part_N), 0
        return tokens_N, starts_N, filled

    def _advance(self, count: int) -> None:
        """Goes `count` tokens on, all of which are held."""
        passed = self._position.token + count
        while self._held and passed >= len(self._held[0].tokens_N):
            block, number, tokens_N = self._held.popleft()
            passed -= len(tokens_N)
            self._held_tokens -= len(tokens_N)
            self._position = Position(block, number + 1)
        if self._held:
            self._position = Position(self._held[0].block, self._held[0].number, passed)


def _encoded(
    blocks: Iterator[Block],
    skipped: int,
    framed: Callable[[BlockStart, int, Sequence[str | None]], list[_Document]],
    pool: ThreadPoolExecutor,
) -> Iterator[Future[list[_Document]]]:
    """The documents of the blocks after the first `skipped`; `framed` makes them in `pool`."""
    for block in blocks:
        for first in range(skipped, len(block.texts), DOCUMENTS_AT_A_TIME):
            texts = block.texts[first : first + DOCUMENTS_AT_A_TIME]
            yield pool.submit(framed, block.start, first, texts)
        skipped = 0


def _framed(
    tokenizer: Tokenizer, block: BlockStart, first: int, texts: Sequence[str | None]
) -> list[_Document]:
    """The tokens of each text between the tokenizer's begin and end of text."""
    numbers = [number for number, text in enumerate(texts, start=first) if text is not None]
    encoded = tokenizer.encode_batch([text for text in texts if text is not None])
    begin_N, end_N = (
        np.array([] if token is None else [token], np.int32)
        for token in (tokenizer.bos_id, tokenizer.eos_id)
    )
    return [
        _Document(block, number, np.concatenate([begin_N, ids_N.astype(np.int32), end_N]))
        for number, ids_N in zip(numbers, encoded, strict=True)
    ]
