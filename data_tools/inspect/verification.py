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
    found = _Found(progress)
    shards = list(_readable_shards(folder, found))
    if not found.damages:
        try:
            read_split(folder)
        except (OSError, ValueError) as error:  # the shards do not belong together
            found.add(folder, str(error))
    for shard in shards:  # tokens, loss mask, documents; the fourth array is negligible
        found.values += shard.tokens * (1 if shard.content == "text" else 2) + shard.documents
    for shard in shards:
        _verify_shard(found, folder / shard.name, shard)
    for tokenizer in {shard.tokenizer for shard in shards}:
        _verify_tokenizer(found, data_path(folder).parent / TOKENIZER_FILE, tokenizer)
    return found.damages


class _Found:
    """The damage found so far, and the arrays being read."""

    def __init__(self, progress: Progress) -> None:
        self.damages: list[Damage] = []
        self.values = 0  # number of values to read
        self._read, self._progress = 0, progress

    def add(self, path: Path, reason: str) -> None:
        self.damages.append(Damage(path, reason))

    def array(self, path: Path, length: int, digest: str) -> StoredArray | None:
        """Opens an array; None if it is damaged as a whole."""
        try:
            stored = open_array(path, length, reading_context(), digest)
            stored.check_files(some_lost=True)
            return stored
        except DamagedDataError as error:
            self.add(path, _cause_of(error))
            self._count(length)
            return None

    def blocks(self, array: StoredArray | None) -> Iterator[np.ndarray]:
        """Yields its values in order, a few million at a time, skipping damaged files."""
        if array is None:
            return
        folder = array.path / array.files_folder
        for number, start in enumerate(range(0, array.length, array.file_length)):
            stop = min(start + array.file_length, array.length)
            for first in range(start, stop, BLOCK_LENGTH):
                last = min(first + BLOCK_LENGTH, stop)
                try:
                    values = array.read(first, last)()
                except DamagedDataError as error:
                    file = folder / str(number)
                    self.add(file, _cause_of(error) if file.exists() else "is missing")
                    self._count(stop - first)
                    break
                yield values
                self._count(last - first)

    def _count(self, values: int) -> None:
        self._read += values
        self._progress({"values": self._read}, self._read / max(self.values, 1))


def _readable_shards(folder: Path, found: _Found) -> Iterator[ShardMetadata]:
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
            found.add(folder / name, "is unfinished" if there else "is missing")
        except ValueError as error:
            found.add(folder / name, str(error))
    if not present:
        found.add(folder, "holds no shard")


def _verify_shard(found: _Found, folder: Path, shard: ShardMetadata) -> None:
    """Compares a shard with its metadata.json."""
    tokens = found.array(folder / "tokens", shard.tokens, shard.digests["tokens"])
    if tokens is None:
        for name in arrays_of(shard.content)[1:]:
            if not (folder / name).is_dir():
                found.add(folder / name, "is missing")
        return
    before = len(found.damages)
    largest = max((int(block_N.max()) for block_N in found.blocks(tokens)), default=-1)
    if len(found.damages) == before:
        _expect(found, folder, "max_token_id", shard.max_token_id, largest)
    if shard.max_token_id >= shard.vocab_size:
        found.add(
            folder / FILE_NAME,
            f"has max_token_id {shard.max_token_id}, outside the vocabulary of {shard.vocab_size}",
        )
    _verify_starts(found, folder, shard, tokens.chunk_length)
    if shard.content != "text":
        before = len(found.damages)
        mask = found.array(folder / LOSS_MASK, shard.tokens, shard.digests[LOSS_MASK])
        targets, largest = 0, 0
        for block_N in found.blocks(mask):
            targets += int(np.count_nonzero(block_N))
            largest = max(largest, int(block_N.max()))
        if len(found.damages) == before:
            _expect(found, folder, "targets", shard.targets, targets)
            if largest > 1:
                found.add(folder / LOSS_MASK, f"holds {largest}, which is neither 0 nor 1")


def _verify_starts(found: _Found, folder: Path, shard: ShardMetadata, chunk_length: int) -> None:
    """Compares document_starts and first_documents with each other and with the counts."""
    chunk_start_C = np.arange(0, shard.tokens + chunk_length, chunk_length)
    before_C = np.zeros(len(chunk_start_C), np.int64)  # documents that start before each chunk
    path, before = folder / "document_starts", len(found.damages)
    starts = found.array(path, shard.documents, shard.digests[path.name])
    previous, nonempty = 0, 0
    for number, start_N in enumerate(found.blocks(starts)):
        start_N = start_N.astype(np.int64)
        if number == 0 and start_N[0] != 0 and len(found.damages) == before:
            found.add(path, f"begins with {start_N[0]}, not with 0")
        if (np.diff(start_N, prepend=previous) < 0).any():
            found.add(path, "decreases")
            break
        if start_N[-1] > shard.tokens:
            found.add(path, f"goes up to {start_N[-1]}, beyond the tokens")
            break
        before_C += np.searchsorted(start_N, chunk_start_C)
        # A document is empty if the next one, or the end, has the same offset.
        new_N = np.diff(start_N, prepend=previous) > 0
        nonempty += int(np.count_nonzero(new_N & (start_N < shard.tokens)))
        previous = int(start_N[-1])
    if len(found.damages) == before and shard.content == "text":
        nonempty += shard.tokens > 0  # the document at offset 0
        _expect(found, folder, "targets", shard.targets, shard.tokens - nonempty)
    path = folder / "first_documents"
    blocks = list(found.blocks(found.array(path, len(before_C), shard.digests[path.name])))
    if len(found.damages) == before:
        wrong_C = np.flatnonzero(np.concatenate(blocks).astype(np.int64) != before_C)
        if len(wrong_C):
            found.add(path, f"disagrees with document_starts at {wrong_C[0]}")


def _expect(found: _Found, folder: Path, name: str, promised: int, counted: int) -> None:
    if promised != counted:
        found.add(folder / FILE_NAME, f"has {name} {promised}, but the arrays have {counted}")


def _verify_tokenizer(found: _Found, file: Path, tokenizer: TokenizerIdentity | None) -> None:
    if tokenizer is None or tokenizer.sha256 is None:
        return
    if not file.is_file():
        found.add(file, "is missing")
    elif file.stat().st_size > LARGEST_TOKENIZER:
        found.add(file, f"has {file.stat().st_size:,} bytes: it is not a tokenizer")
    else:
        with open(file, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != tokenizer.sha256:
            found.add(file, f"has sha256 {digest}, but the tokens were made with another")


def _cause_of(error: Exception) -> str:
    """Returns TensorStore's error in one line without its settings."""
    return str(error.__cause__ or error).partition(" [")[0]
