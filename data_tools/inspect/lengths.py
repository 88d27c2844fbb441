"""How long the documents of a split are.

Shape suffixes: N documents, L distinct lengths.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.inspect.progress import Progress, no_progress
from data_tools.inspect.splits import BLOCK_LENGTH, blocks
from lmlib.data.metadata import FILE_NAME, read_shard, shard_folders
from lmlib.data.seqax import SeqaxSplit, is_seqax_split
from lmlib.data.token_arrays import StoredArray, reading_context


@dataclass(frozen=True)
class LengthBin:
    """How many documents have `first` to `last` tokens."""

    first: int
    last: int
    documents: int


@dataclass(frozen=True)
class DocumentLengths:
    """How many documents have each length that occurs.

    Distinct lengths are fewer than the square root of twice the tokens, so exact counts of even
    the largest split are small.
    """

    lengths_L: np.ndarray  # int64, ascending, in tokens
    counts_L: np.ndarray  # int64

    @property
    def documents(self) -> int:
        return int(self.counts_L.sum())

    def percentile(self, percent: float) -> int:
        """The shortest length that at least `percent` of the documents do not exceed.

        There must be documents.
        """
        rank = max(1, int(np.ceil(self.documents * percent / 100)))
        return int(self.lengths_L[np.searchsorted(np.cumsum(self.counts_L), rank)])

    def bins(self) -> list[LengthBin]:
        """Documents of 0, 1, 2 to 3, 4 to 7, … tokens, without the bins outside the data."""
        _, bit_length_L = np.frexp(self.lengths_L.astype(np.float64))
        counts = np.bincount(bit_length_L, weights=self.counts_L).astype(np.int64)
        first = int(bit_length_L.min()) if len(bit_length_L) else 0
        return [
            LengthBin((1 << bits) >> 1, max((1 << bits) - 1, 0), int(counts[bits]))
            for bits in range(first, len(counts))
        ]


def document_lengths(folder: Path, progress: Progress = no_progress) -> DocumentLengths:
    """The lengths of the documents in the finished shards of the split in `folder`.

    In seqax's format it reads all tokens, since only their lowest bits tell, and documents
    without tokens do not count. Raises DamagedDataError for what cannot be read.
    """
    lengths_L, counts_L = np.zeros(0, np.int64), np.zeros(0, np.int64)
    seqax = is_seqax_split(folder)
    for lengths_N in (_seqax_lengths if seqax else _lengths)(folder, progress):
        lengths_L, group = np.unique(np.concatenate([lengths_L, lengths_N]), return_inverse=True)
        counted = np.concatenate([counts_L, np.ones(len(lengths_N), np.int64)])
        counts_L = np.zeros(len(lengths_L), np.int64)
        np.add.at(counts_L, group, counted)
    return DocumentLengths(lengths_L, counts_L)


def _lengths(folder: Path, progress: Progress) -> Iterator[np.ndarray]:
    finished = [shard for shard in shard_folders(folder) if (shard / FILE_NAME).exists()]
    total = sum(read_shard(shard).documents for shard in finished)
    context, done = reading_context(), 0
    for shard in finished:
        metadata = read_shard(shard)
        starts = StoredArray(shard / "document_starts", metadata.documents, context)
        pieces = (
            starts.read(first, min(first + BLOCK_LENGTH, starts.length)).result()
            for first in range(0, starts.length, BLOCK_LENGTH)
        )
        for lengths_N in _differences(pieces, metadata.tokens):
            yield lengths_N
            done += len(lengths_N)
            progress(done, total, "documents")


def _seqax_lengths(folder: Path, progress: Progress) -> Iterator[np.ndarray]:
    split = SeqaxSplit(folder)

    def starts() -> Iterator[np.ndarray]:
        done = 0
        for tokens, begins in blocks(split):
            yield np.flatnonzero(begins) + done
            done += len(tokens)
            progress(done, split.tokens, "tokens")

    return _differences(starts(), split.tokens)


def _differences(pieces: Iterable[np.ndarray], end: int) -> Iterator[np.ndarray]:
    """Each document's start to the next one's, or to `end`."""
    last_start = np.zeros(0, np.int64)
    for starts_N in pieces:
        starts_N = np.concatenate([last_start, starts_N.astype(np.int64)])
        yield np.diff(starts_N)
        last_start = starts_N[-1:]
    if len(last_start):
        yield end - last_start
