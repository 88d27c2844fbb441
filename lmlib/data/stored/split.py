"""A split of flat tokens on disk, opened for reading.

Memory holds only three numbers for every 16 Ki tokens, and one for every 1 Ki documents.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np

from lmlib.data.stored.data_path import is_seqax_split
from lmlib.data.stored.metadata import (
    LOSS_MASK,
    DamagedDataError,
    ShardMetadata,
    SplitMetadata,
    digest,
    read_split,
)
from lmlib.data.stored.token_arrays import StoredArray, open_array, reading_context

_STARTS_AT_ONCE = 1 << 20  # read at once
# The tokens (unsigned), the mask of document starts, and the mask of targets, which are in the loss
# mask and not the first token of a document; of labelled answers the latter is True for labels.
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def open_split(folder: Path) -> "StoredSplit":
    """Opens the split in `folder`, in this library's format or seqax's.

    Raises FileNotFoundError for an unfinished split, DamagedDataError for a damaged one.
    """
    if not is_seqax_split(folder):
        return StoredSplit(folder)
    from lmlib.data.stored.seqax import SeqaxSplit

    return SeqaxSplit(folder)


class StoredSplit:
    """A split in the format of docs/flat-tokens.md.

    Attributes:
      metadata: its metadata.json; None in other formats.
      tokens, documents: their number.
      max_token_id: the largest id in the split.
      digest: of all arrays and the tokenizer; equal for copies.
    """

    metadata: SplitMetadata | None

    def __init__(self, folder: Path) -> None:
        """See `open_split`."""
        self._folder = folder
        self.metadata = metadata = read_split(folder)
        self.max_token_id = metadata.max_token_id
        self.digest = digest(f"{metadata.digest} {metadata.tokenizer}".encode())
        context, shards = reading_context(), metadata.shards

        def opened(name: str, lengths: list[int]) -> list[StoredArray]:
            arrays = []
            for shard, length in zip(shards, lengths, strict=True):
                path = folder / shard.name / name
                arrays.append(open_array(path, length, context, shard.digests[name]))
                arrays[-1].check_files()  # before allocating arrays of the claimed length
            return arrays

        tokens = [shard.tokens for shard in shards]
        self._tokens = opened("tokens", tokens)
        self._labelled = metadata.content == "labelled"
        self._loss_masks = opened(LOSS_MASK, tokens) if metadata.content != "text" else []
        self._starts = opened("document_starts", [shard.documents for shard in shards])
        chunks = [-(-array.length // array.chunk_length) for array in self._tokens]
        indexes = opened("first_documents", [count + 1 for count in chunks])
        coming = [array.read(0, array.length) for array in indexes]
        # The first chunk shows if an array was swapped with another.
        first_read = self._tokens + self._loss_masks + self._starts
        first_chunks = [array.read(0, min(1, array.length)) for array in first_read]
        self._first_documents = [
            _checked_index(array.path, read(), shard)
            for array, read, shard in zip(indexes, coming, shards, strict=True)
        ]
        for read in first_chunks:
            read()
        self._offsets = [0, *accumulate(tokens)]
        self.tokens, self.documents = self._offsets[-1], metadata.documents

    def read(self, start: int, stop: int) -> Callable[[], Arrays]:
        """Starts reading tokens [start, stop); returns a function that waits for them.

        The function raises DamagedDataError for unreadable data.
        """
        pieces = []
        while start < stop:
            shard = bisect_right(self._offsets, start) - 1
            offset, end = self._offsets[shard], min(stop, self._offsets[shard + 1])
            pieces.append(self._read_in_shard(shard, start - offset, end - offset))
            start = end

        def joined() -> Arrays:
            empty = np.zeros(0, np.uint16), np.zeros(0, bool), np.zeros(0, bool)
            parts = [piece() for piece in pieces] or [empty]
            tokens, begins, targets = map(np.concatenate, zip(*parts, strict=True))
            return tokens, begins, targets

        return joined

    def edges(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the token offsets (int64) of documents [first, stop), and the last one's end."""
        stop = self.documents if stop is None else stop
        edges, before = [np.zeros(0, np.int64)], 0
        for offset, starts in zip(self._offsets, self._starts, strict=False):
            begin, end = max(first - before, 0), min(stop + 1 - before, starts.length)
            for place in range(begin, end, _STARTS_AT_ONCE):
                read = starts.read(place, min(place + _STARTS_AT_ONCE, end))
                edges.append(read().astype(np.int64) + offset)
            before += starts.length
        if stop == self.documents:
            edges.append(np.array([self.tokens]))
        found = np.concatenate(edges)
        if (first == 0 and found[0] != 0) or (np.diff(found, append=self.tokens) < 0).any():
            raise DamagedDataError(
                f"{self._folder} has document_starts that decrease or lie beyond the tokens: the "
                "data set is damaged; make it again"
            )
        return found

    def _read_in_shard(self, shard: int, start: int, stop: int) -> Callable[[], Arrays]:
        chunk_length = self._tokens[shard].chunk_length
        first_documents = self._first_documents[shard]
        first = int(first_documents[start // chunk_length])
        last = int(first_documents[-(-stop // chunk_length)])
        starts = self._starts[shard].read(first, last) if first < last else None
        mask = self._loss_masks[shard].read(start, stop) if self._loss_masks else None
        tokens = self._tokens[shard].read(start, stop)

        def arrays() -> Arrays:
            tokens_N = tokens()
            begins_N = np.zeros(len(tokens_N), bool)
            if starts is not None:
                places = starts().astype(np.int64) - start
                begins_N[places[(places >= 0) & (places < len(tokens_N))]] = True
            if mask is None:
                return tokens_N, begins_N, ~begins_N
            marked_N = mask() != 0
            return tokens_N, begins_N, marked_N if self._labelled else marked_N & ~begins_N

        return arrays


def _checked_index(array: Path, first_documents: np.ndarray, shard: ShardMetadata) -> np.ndarray:
    """Returns `first_documents` (uint64) as int64.

    Raises DamagedDataError if it fits no document_starts.
    """
    found = first_documents.astype(np.int64)
    if (np.diff(found) < 0).any() or found[0] != 0 or found[-1] > shard.documents:
        raise DamagedDataError(
            f"{array} is not a count of {shard.documents} documents: the data set is damaged; make "
            "it again"
        )
    return found
