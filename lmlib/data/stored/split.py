"""A split of flat tokens on disk, opened for reading: spans of tokens, and where documents begin.

Nothing but three numbers for every 16 Ki tokens, and one for every 1 Ki documents, is held in
memory. A span is one read of tokens, one of their loss mask if there is one, and one of document
starts in each shard that it touches.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from lmlib.data.stored.damage import DamagedDataError
from lmlib.data.stored.digests import digest
from lmlib.data.stored.metadata import LOSS_MASK, SplitMetadata, read_split
from lmlib.data.stored.token_arrays import Reading, StoredArray, reading_context

_STARTS_AT_ONCE = 1 << 20  # that are read


@runtime_checkable
class Span(Protocol):
    """Tokens on their way from disk."""

    def result(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens (any unsigned integer), whether each begins a document (bool), and whether
        each is a target (bool): not the first of its document, and in the loss mask.

        Raises DamagedDataError for what cannot be read.
        """


class StoredSplit:
    """A split in the format of docs/flat-tokens.md."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError for an unfinished split, DamagedDataError for a damaged one."""
        self.metadata: SplitMetadata = read_split(folder)
        self._folder = folder
        context = reading_context()
        shards = self.metadata.shards

        def open_arrays(name: str, lengths: Sequence[int]) -> list[StoredArray]:
            opened = []
            for shard, length in zip(shards, lengths, strict=True):
                array = folder / shard.name / name
                opened.append(StoredArray(array, length, context, digest=shard.digests[name]))
                opened[-1].check_files()  # before anything as long as it claims is allocated
            return opened

        self._tokens = open_arrays("tokens", [shard.tokens for shard in shards])
        masked = self.metadata.content != "text"
        lengths = [shard.tokens for shard in shards]
        self._loss_masks = open_arrays(LOSS_MASK, lengths) if masked else []
        self._starts = open_arrays("document_starts", [shard.documents for shard in shards])
        entries = [-(-array.length // array.chunk_length) + 1 for array in self._tokens]
        indexes = [array.read(0, array.length) for array in open_arrays("first_documents", entries)]
        self._first_documents = [
            _checked_index(folder / shard.name, index.result(), shard.documents)
            for shard, index in zip(shards, indexes, strict=True)
        ]
        # Arrays that lie in the place of others show it in their first chunk.
        first_read = self._tokens + self._loss_masks + self._starts
        beginnings = [array.read(0, min(1, array.length)) for array in first_read]
        for beginning in beginnings:
            beginning.result()
        self._offsets = [0, *accumulate(shard.tokens for shard in shards)]
        self._document_offsets = [0, *accumulate(shard.documents for shard in shards)]
        self.tokens = self._offsets[-1]
        self.documents = self._document_offsets[-1]

    @property
    def digest(self) -> str:
        """A digest of all arrays and the tokenizer. A copy elsewhere has the same."""
        return digest(f"{self.metadata.digest} {self.metadata.tokenizer}".encode())

    def read(self, start: int, stop: int) -> Span:
        """Starts reading tokens [start, stop)."""
        pieces = []
        while start < stop:
            shard = bisect_right(self._offsets, start) - 1
            offset, end = self._offsets[shard], min(stop, self._offsets[shard + 1])
            pieces.append(self._read_in_shard(shard, start - offset, end - offset))
            start = end
        return pieces[0] if len(pieces) == 1 else _Joined(pieces)

    def document_bounds(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where each of `documents` (int64 numbers) starts and stops, in tokens."""
        readings = []
        for document in documents.tolist():
            shard = bisect_right(self._document_offsets, document) - 1
            number = document - self._document_offsets[shard]
            starts = self._starts[shard]
            last = number + 1 == starts.length
            readings.append((shard, last, starts.read(number, number + (1 if last else 2))))
        bounds = []
        for shard, last, reading in readings:
            ends = [self._tokens[shard].length] if last else []
            bounds.append([*reading.result().tolist(), *ends])
            bounds[-1] = [place + self._offsets[shard] for place in bounds[-1]]
        if any(not 0 <= start <= stop <= self.tokens for start, stop in bounds):
            raise self._damaged_starts()
        starts_stops = np.array(bounds, np.int64).reshape(-1, 2)
        return starts_stops[:, 0], starts_stops[:, 1]

    def document_edges(self) -> np.ndarray:
        """Where each document starts, in tokens, and where the last stops: int64."""
        edges = [np.zeros(0, np.int64)]
        for offset, starts in zip(self._offsets, self._starts, strict=False):
            for first in range(0, starts.length, _STARTS_AT_ONCE):
                reading = starts.read(first, min(first + _STARTS_AT_ONCE, starts.length))
                edges.append(reading.result().astype(np.int64) + offset)
        edges.append(np.array([self.tokens]))
        found = np.concatenate(edges)
        if found[0] != 0 or (np.diff(found) < 0).any():
            raise self._damaged_starts()
        return found

    def _damaged_starts(self) -> DamagedDataError:
        return DamagedDataError(
            f"{self._folder} has document_starts that decrease or lie beyond the tokens: the data "
            "set is damaged; make it again"
        )

    def _read_in_shard(self, shard: int, start: int, stop: int) -> "_SpanInShard":
        chunk_length = self._tokens[shard].chunk_length
        first_documents = self._first_documents[shard]
        first = int(first_documents[start // chunk_length])
        last = int(first_documents[-(-stop // chunk_length)])
        starts = self._starts[shard].read(first, last) if first < last else None
        mask = self._loss_masks[shard].read(start, stop) if self._loss_masks else None
        return _SpanInShard(self._tokens[shard].read(start, stop), mask, starts, start)


def _checked_index(shard_folder: Path, first_documents: np.ndarray, documents: int) -> np.ndarray:
    """`first_documents` (uint64) as int64; DamagedDataError if no document_starts can belong."""
    ordered = (np.diff(first_documents.astype(np.int64)) >= 0).all()
    if not ordered or first_documents[0] != 0 or first_documents[-1] > documents:
        raise DamagedDataError(
            f"{shard_folder / 'first_documents'} is no count of {documents} documents: the data "
            "set is damaged; make it again"
        )
    return first_documents.astype(np.int64)


class _SpanInShard:
    def __init__(
        self, tokens: Reading, mask: Reading | None, starts: Reading | None, first: int
    ) -> None:
        self._tokens, self._mask, self._starts, self._first = tokens, mask, starts, first

    def result(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = self._tokens.result()
        begins = np.zeros(len(tokens), bool)
        if self._starts is not None:
            places = self._starts.result().astype(np.int64) - self._first
            begins[places[(places >= 0) & (places < len(tokens))]] = True
        targets = ~begins
        if self._mask is not None:
            targets &= self._mask.result() != 0
        return tokens, begins, targets


class _Joined:
    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def result(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        results = [span.result() for span in self._spans]
        if not results:
            return np.zeros(0, np.uint16), np.zeros(0, bool), np.zeros(0, bool)
        tokens, begins, targets = map(np.concatenate, zip(*results, strict=True))
        return tokens, begins, targets
