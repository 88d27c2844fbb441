"""Reads all of a split and lists its damage, for `--verify` of the inspect commands.

Shape suffixes: N values of a block, C chunks of tokens and one more.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_tools.command_line import Progress, no_progress
from data_tools.inspect.description import BLOCK_LENGTH
from lmlib.data.stored.data_path import data_path, is_seqax_split
from lmlib.data.stored.metadata import (
    FILE_NAME,
    LARGEST_TOKENIZER,
    LOSS_MASK,
    TOKENIZER_FILE,
    DamagedDataError,
    ShardMetadata,
    TokenizerIdentity,
    arrays_of,
    read_shard,
    read_split,
    shard_folders,
    shard_name,
    shard_number,
)
from lmlib.data.stored.token_arrays import StoredArray, open_array, reading_context


class Damage(NamedTuple):
    """A damaged part of a data set."""

    path: Path  # the file, or the folder of the array or shard
    reason: str


def verify_split(folder: Path, progress: Progress = no_progress) -> list[Damage]:
    """Returns the damage of the split in `folder`; empty if there is none.

    Reads every array of every shard, which checks every checksum and digest. Compares the arrays
    with each other and with metadata.json, and tokenizer.json with its digest. An unfinished shard
    counts as damage. Raises ValueError for seqax's format, which has no checksums.
    """
    if is_seqax_split(folder):
        raise ValueError(
            f"{folder} is in seqax's format, which has no checksums to verify: convert it with "
            "python -m data_tools.convert"
        )
    verification = _Verification(progress)
    verification.verify(folder)
    return verification.damages


class _Verification:
    """The damage found so far, and the number of values to read and already read."""

    def __init__(self, progress: Progress) -> None:
        self.damages: list[Damage] = []
        self._values = self._read = 0
        self._progress = progress

    def _add(self, path: Path, reason: str) -> None:
        self.damages.append(Damage(path, reason))

    def verify(self, folder: Path) -> None:
        shards = list(self._readable_shards(folder))
        if not self.damages:
            try:
                read_split(folder)
            except (OSError, ValueError) as error:  # the shards do not belong together
                self._add(folder, str(error))
        for shard in shards:  # tokens, loss mask, documents; the fourth array is negligible
            self._values += shard.tokens * (1 if shard.content == "text" else 2) + shard.documents
        for shard in shards:
            self._verify_shard(folder / shard.name, shard)
        for tokenizer in {shard.tokenizer for shard in shards}:
            self._verify_tokenizer(data_path(folder).parent / TOKENIZER_FILE, tokenizer)

    def _readable_shards(self, folder: Path) -> Iterator[ShardMetadata]:
        """Yields the shards with a readable metadata.json; records the others as damage."""
        present = shard_folders(folder)
        counts = {number[1] for number in map(shard_number, present) if number}
        expected = counts if len(counts) == 1 else ()  # if there are several, one is wrong
        names = {shard_name(shard, count) for count in expected for shard in range(count)}
        for name in sorted(names | {shard.name for shard in present}):
            try:
                yield read_shard(folder / name)
            except FileNotFoundError:
                there = (folder / name).is_dir()
                self._add(folder / name, "is unfinished" if there else "is missing")
            except ValueError as error:
                self._add(folder / name, str(error))
        if not present:
            self._add(folder, "holds no shard")

    def _array(
        self, folder: Path, shard: ShardMetadata, name: str, length: int
    ) -> StoredArray | None:
        """Opens an array; None if it is damaged as a whole."""
        try:
            stored = open_array(folder / name, length, reading_context(), shard.digests[name])
            stored.check_files(some_lost=True)
            return stored
        except DamagedDataError as error:
            self._add(folder / name, _cause_of(error))
            self._count(length)
            return None

    def _blocks(self, array: StoredArray | None) -> Iterator[np.ndarray]:
        """Yields its values in order, a few million at a time, skipping damaged files."""
        if array is None:
            return
        for number, start in enumerate(range(0, array.length, array.file_length)):
            stop = min(start + array.file_length, array.length)
            for first in range(start, stop, BLOCK_LENGTH):
                last = min(first + BLOCK_LENGTH, stop)
                try:
                    values = array.read(first, last)()
                except DamagedDataError as error:
                    file = array.path / array.files_folder / str(number)
                    self._add(file, _cause_of(error) if file.exists() else "is missing")
                    self._count(stop - first)
                    break
                yield values
                self._count(last - first)

    def _count(self, values: int) -> None:
        self._read += values
        self._progress({"values": self._read}, self._read / max(self._values, 1))

    def _expect(self, folder: Path, name: str, promised: int, counted: int) -> None:
        if promised != counted:
            self._add(folder / FILE_NAME, f"has {name} {promised}, but the arrays have {counted}")

    def _verify_shard(self, folder: Path, shard: ShardMetadata) -> None:
        """Compares a shard with its metadata.json."""
        tokens = self._array(folder, shard, "tokens", shard.tokens)
        if tokens is None:
            for name in arrays_of(shard.content)[1:]:
                if not (folder / name).is_dir():
                    self._add(folder / name, "is missing")
            return
        before = len(self.damages)
        largest = max((int(block_N.max()) for block_N in self._blocks(tokens)), default=-1)
        if len(self.damages) == before:
            self._expect(folder, "max_token_id", shard.max_token_id, largest)
        if shard.max_token_id >= shard.vocab_size:
            outside = f"outside the vocabulary of {shard.vocab_size}"
            self._add(folder / FILE_NAME, f"has max_token_id {shard.max_token_id}, {outside}")
        self._verify_starts(folder, shard, tokens.chunk_length)
        if shard.content == "text":
            return
        before, targets, largest = len(self.damages), 0, 0
        for block_N in self._blocks(self._array(folder, shard, LOSS_MASK, shard.tokens)):
            targets += int(np.count_nonzero(block_N))
            largest = max(largest, int(block_N.max()))
        if len(self.damages) == before:
            labels = shard.documents // 2 if shard.content == "labelled" else 0  # some are false
            if not shard.targets <= targets <= shard.targets + labels:
                self._expect(folder, "targets", shard.targets, targets)
            if largest > 1:
                self._add(folder / LOSS_MASK, f"holds {largest}, which is neither 0 nor 1")

    def _verify_starts(self, folder: Path, shard: ShardMetadata, chunk_length: int) -> None:
        """Compares document_starts and first_documents with each other and with the counts."""
        chunk_start_C = np.arange(0, shard.tokens + chunk_length, chunk_length)
        before_C = np.zeros(len(chunk_start_C), np.int64)  # documents that start before each chunk
        path, before = folder / "document_starts", len(self.damages)
        previous, nonempty = 0, 0
        starts = self._array(folder, shard, path.name, shard.documents)
        for number, start_N in enumerate(self._blocks(starts)):
            start_N = start_N.astype(np.int64)
            if number == 0 and start_N[0] != 0 and len(self.damages) == before:
                self._add(path, f"begins with {start_N[0]}, not with 0")
            # A document is empty if the next one, or the end, has the same offset.
            step_N = np.diff(start_N, prepend=previous)
            if (step_N < 0).any():
                self._add(path, "decreases")
                break
            if start_N[-1] > shard.tokens:
                self._add(path, f"goes up to {start_N[-1]}, beyond the tokens")
                break
            before_C += np.searchsorted(start_N, chunk_start_C)
            nonempty += int(np.count_nonzero((step_N > 0) & (start_N < shard.tokens)))
            previous = int(start_N[-1])
        if len(self.damages) == before and shard.content == "text":
            nonempty += shard.tokens > 0  # the document at offset 0
            self._expect(folder, "targets", shard.targets, shard.tokens - nonempty)
        blocks = list(self._blocks(self._array(folder, shard, "first_documents", len(before_C))))
        if len(self.damages) == before:
            wrong_C = np.flatnonzero(np.concatenate(blocks).astype(np.int64) != before_C)
            if len(wrong_C):
                reason = f"disagrees with document_starts at {wrong_C[0]}"
                self._add(folder / "first_documents", reason)

    def _verify_tokenizer(self, file: Path, tokenizer: TokenizerIdentity | None) -> None:
        if tokenizer is None or tokenizer.sha256 is None:
            return
        if not file.is_file():
            self._add(file, "is missing")
        elif file.stat().st_size > LARGEST_TOKENIZER:
            self._add(file, f"has {file.stat().st_size:,} bytes: it is not a tokenizer")
        elif (digest := hashlib.sha256(file.read_bytes()).hexdigest()) != tokenizer.sha256:
            self._add(file, f"has sha256 {digest}, but the tokens were made with another")


def _cause_of(error: Exception) -> str:
    """Returns TensorStore's error in one line without its settings."""
    return str(error.__cause__ or error).partition(" [")[0]
