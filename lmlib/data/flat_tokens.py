"""Batches from flat tokens on disk, in an order that is a function of (seed, step).

The format is in docs/flat-tokens.md.
Shape suffixes: B batch (rows), S sequence, T = S + 1 tokens of a row, D documents.
"""

import hashlib
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from lmlib.data.batch import Batch
from lmlib.data.flat_tokens_writer import TOKENIZER_FILE
from lmlib.data.metadata import FILE_NAME, Metadata, read_metadata
from lmlib.data.packing import packed_batch
from lmlib.data.permutation import permute
from lmlib.data.token_arrays import DamagedDataError, Reading, StoredArray, reading_context


class FlatTokens:
    """A split of flat tokens, cut into consecutive sequences and shuffled anew each epoch.

    Sequence i predicts tokens [i·S + 1, (i+1)·S] of the concatenated shards, so that an epoch
    predicts every token but the very first exactly once; the last sequence is padded. Row r of
    step t is number p = t·batch_size + r: of epoch p // sequences, and there the sequence that
    the permutation keyed by (seed, epoch) puts at p % sequences.
    """

    def __init__(
        self,
        path: str,
        split: str,
        batch_size: int,
        sequence_length: int,
        seed: int | None = 0,
        repeat: bool = True,
    ) -> None:
        """Opens the split; `seed=None` keeps the stored order.

        With `repeat=False` there is one epoch, and rows past its end are padding.

        Raises FileNotFoundError if the data set or split is not there or unfinished, ValueError
        for settings or metadata that make no sense, DamagedDataError (a ValueError) if the
        stored arrays are damaged.
        """
        for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
            if value < 1:
                raise ValueError(f"FlatTokens needs a {name} of at least 1, not {value}")
        if seed is not None and not 0 <= seed < 2**64:
            raise ValueError(f"FlatTokens needs a seed in [0, 2**64) or None, not {seed}")
        folder = _find_split(Path(path), split)
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.metadata = read_metadata(folder)
        self._seed = seed
        self._repeat = repeat
        self._path = Path(path)
        _check_tokenizer(self._path / TOKENIZER_FILE, self.metadata)

        if self.tokens < 2:
            raise ValueError(f"{folder} holds {self.tokens} token: at least 2 make a sequence")
        context = reading_context()
        shards = self.metadata.shards
        self._offsets = [0, *accumulate(shard.tokens for shard in shards)]
        self._arrays = [
            StoredArray(folder / shard.name / "tokens", shard.tokens, context) for shard in shards
        ]
        starts = [
            StoredArray(folder / shard.name / "document_starts", shard.documents, context)
            for shard in shards
        ]
        readings = [array.read(0, array.length) for array in starts]
        self._document_starts_D = np.concatenate(
            [
                reading.result().astype(np.int64) + offset
                for reading, offset in zip(readings, self._offsets, strict=False)
            ]
        )

    @property
    def max_token_id(self) -> int:
        """The largest token id in the split."""
        return self.metadata.max_token_id

    @property
    def tokens(self) -> int:
        """Tokens in the split, framing included."""
        return self.metadata.tokens

    @property
    def documents(self) -> int:
        """Documents in the split."""
        return self.metadata.documents

    @property
    def bytes(self) -> int:
        """Bytes of the documents' UTF-8 text."""
        return self.metadata.bytes

    @property
    def sequences(self) -> int:
        """Sequences in an epoch."""
        return -(-(self.tokens - 1) // self.sequence_length)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see each sequence at least once."""
        return -(-self.sequences // self.batch_size)

    @property
    def batches(self) -> int | None:
        """Steps until `repeat=False` has nothing left; `None` if it repeats."""
        return None if self._repeat else self.steps_per_epoch

    @property
    def bytes_per_target(self) -> float | None:
        """UTF-8 bytes for each target in an epoch: all tokens but the first of each document."""
        # Empty documents start where the next one does, or at the very end.
        starts_D = np.unique(self._document_starts_D)
        targets = self.tokens - np.count_nonzero(starts_D < self.tokens)
        return self.bytes / targets if targets else None

    @property
    def gzip_bits_per_byte(self) -> float | None:
        """What `gzip -9` needs for these documents, each alone; `None` if it was not measured."""
        compressed = self.metadata.gzip_bytes
        return 8 * compressed / self.bytes if compressed is not None and self.bytes else None

    @property
    def tokenizer_path(self) -> Path | None:
        """The tokenizer.json that made the tokens, if the data set has one."""
        file = self._path / TOKENIZER_FILE
        return file if file.exists() else None

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The given rows of the batch of `step`; see `Source.batch`.

        Raises ValueError for a negative step, DamagedDataError for tokens that cannot be read.
        """
        if step < 0:
            raise ValueError(f"a batch's step must be at least 0, not {step}")
        first_B = self._sequence_numbers(step, rows) * self.sequence_length
        readings = [self._read(int(first)) for first in first_B]  # all under way before any wait

        tokens_BT = np.zeros((len(first_B), self.sequence_length + 1), np.int32)
        starts_BT = np.zeros(tokens_BT.shape, bool)
        for row, (first, pieces) in enumerate(zip(first_B, readings, strict=True)):
            held = np.concatenate([np.array([], np.int32), *(piece.result() for piece in pieces)])
            tokens_BT[row, : len(held)] = held
            span = np.searchsorted(self._document_starts_D, [first, first + len(held)])
            starts_BT[row, self._document_starts_D[slice(*span)] - first] = True
        lengths_B = np.clip(self.tokens - 1 - first_B, 0, self.sequence_length)
        return packed_batch(tokens_BT, starts_BT, lengths_B)

    def _sequence_numbers(self, step: int, rows: slice) -> np.ndarray:
        """The sequence in each of `rows`; `sequences`, one past the last, where there is none."""
        number_B = step * self.batch_size + np.arange(self.batch_size)[rows]
        epoch_B, sequence_B = np.divmod(number_B, self.sequences)
        if self._seed is not None:
            for epoch in np.unique(epoch_B):
                here = epoch_B == epoch
                sequence_B[here] = permute(
                    sequence_B[here], self.sequences, seed=self._seed, epoch=int(epoch)
                )
        return sequence_B if self._repeat else np.where(epoch_B == 0, sequence_B, self.sequences)

    def _read(self, first: int) -> list[Reading]:
        """Starts reading a row's tokens from `first`, shard by shard."""
        stop = min(first + self.sequence_length + 1, self.tokens)
        pieces = []
        while first < stop:
            shard = bisect_right(self._offsets, first) - 1
            offset, end = self._offsets[shard], min(stop, self._offsets[shard + 1])
            pieces.append(self._arrays[shard].read(first - offset, end - offset))
            first = end
        return pieces


def _find_split(path: Path, split: str) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no data set at {path}: make one with python -m data_tools.pretokenize "
            f"--dataset=… --split={split} --tokenizer=… --out={path}"
        )
    if not (path / split).is_dir():
        present = sorted(file.parent.name for file in path.glob(f"*/{FILE_NAME}"))
        raise FileNotFoundError(
            f"{path} has no split {split!r}; it has {', '.join(present) or 'none'}"
        )
    return path / split


def _check_tokenizer(file: Path, metadata: Metadata) -> None:
    if metadata.tokenizer is None or metadata.tokenizer.sha256 is None or not file.exists():
        return
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != metadata.tokenizer.sha256:
        raise DamagedDataError(
            f"{file} has sha256 {found}, but the tokens were made with one of "
            f"{metadata.tokenizer.sha256}: restore that file or make the data set again"
        )
