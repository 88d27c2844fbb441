"""Reads all of a split and lists whatever is damaged.

Shape suffixes: N values of a block, C chunks of tokens and one more.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.command_line import Progress, no_progress
from data_tools.inspect.description import BLOCK_LENGTH
from lmlib.data.stored.array_layout import check_claim, file_sizes, seqax_layout
from lmlib.data.stored.damage import DamagedDataError
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import (
    LARGEST_TOKENIZER,
    LOSS_MASK,
    TOKENIZER_FILE,
    ShardMetadata,
    TokenizerIdentity,
    arrays_of,
    read_shard,
    read_split,
    shard_folders,
    shard_name,
    shard_number,
)
from lmlib.data.stored.seqax import STARTS, TOKENS, SeqaxSplit, is_seqax_split
from lmlib.data.stored.token_arrays import StoredArray, reading_context
from lmlib.storage.stored_json import read_json


@dataclass(frozen=True)
class Damage:
    """Something in a data set that is not as it should be."""

    path: Path  # the file, or the folder of the array or shard
    reason: str


Report = Callable[[Damage], None]


def verify_split(folder: Path, progress: Progress = no_progress) -> list[Damage]:
    """All that is wrong with the split in `folder`; empty if nothing is.

    Reads every array of every shard, which checks every checksum and digest, and compares what the
    arrays hold with each other and with metadata.json, and tokenizer.json with its digest. An
    unfinished shard counts as damage. seqax's format has no checksums: there it finds files that
    are missing, cannot be decompressed, or contradict each other.
    """
    damages: list[Damage] = []
    if is_seqax_split(folder):
        _verify_seqax(folder, damages.append, progress)
        return damages
    shards = list(_readable_shards(folder, damages.append))
    if not damages:
        try:
            read_split(folder)
        except (OSError, ValueError) as error:  # they do not belong together
            damages.append(Damage(folder, str(error)))
    values = _Values(sum(map(_length, shards)), progress)
    for metadata in shards:
        _Shard(folder / metadata.name, metadata, damages.append, values).verify()
    for tokenizer in {metadata.tokenizer for metadata in shards}:
        _verify_tokenizer(data_path(folder).parent / TOKENIZER_FILE, tokenizer, damages.append)
    return damages


class _ArrayFiles:
    """A one-dimensional zarr3 or zarr2 array, as its files hold it."""

    def __init__(
        self, path: Path, length: int, driver: str = "zarr3", digest: str | None = None
    ) -> None:
        """Opens it; the arguments and errors are those of `StoredArray`."""
        self._path = path
        self._stored = StoredArray(path, length, reading_context(), driver, digest)
        self._stored.check_claim()
        self.chunk_length = self._stored.chunk_length
        self.length = length

    def blocks(self, report: Report, on_read: Callable[[int], None]) -> Iterator[np.ndarray]:
        """Its values in order, a few million at a time, without those of damaged files.

        Each damaged file goes to `report`, once; `on_read` hears how many values were tried.
        """
        layout = self._stored.layout
        for number, start in enumerate(range(0, self.length, layout.file_length)):
            stop = min(start + layout.file_length, self.length)
            for first in range(start, stop, BLOCK_LENGTH):
                last = min(first + BLOCK_LENGTH, stop)
                try:
                    values = self._stored.read(first, last).result()
                except DamagedDataError as error:
                    report(self._damage(layout.folder / str(number), error))
                    on_read(stop - first)
                    break
                yield values
                on_read(last - first)

    def _damage(self, file: Path, error: DamagedDataError) -> Damage:
        return Damage(file, "is missing" if not file.exists() else _cause_of(error))


class _Values:
    """Counts values as they are read."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def read(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total, "values")


class _Shard:
    """One shard with what its metadata.json promises."""

    def __init__(
        self, folder: Path, metadata: ShardMetadata, report: Report, values: _Values
    ) -> None:
        self._folder, self._metadata = folder, metadata
        self._report, self._values = report, values
        self._damaged = False

    def verify(self) -> None:
        metadata = self._metadata
        tokens = self._array("tokens", metadata.tokens)
        if tokens is None:
            for name in arrays_of(metadata.content)[1:]:
                if not (self._folder / name).is_dir():
                    self._say(name, "is missing")
            return
        largest = max((int(block_N.max()) for block_N in self._blocks(tokens)), default=-1)
        if not self._damaged:
            self._expect("max_token_id", metadata.max_token_id, largest)
        if metadata.max_token_id >= metadata.vocab_size:
            self._say(
                "metadata.json",
                f"has max_token_id {metadata.max_token_id}, outside the vocabulary of "
                f"{metadata.vocab_size}",
            )
        self._verify_starts(tokens.chunk_length)
        if metadata.content != "text":
            self._verify_mask()

    def _verify_starts(self, chunk_length: int) -> None:
        metadata = self._metadata
        chunk_start_C = np.arange(0, metadata.tokens + chunk_length, chunk_length)
        before_C = np.zeros(len(chunk_start_C), np.int64)  # documents that start before a chunk
        self._damaged = False
        starts = self._array("document_starts", metadata.documents)
        previous, nonempty = 0, 0
        for number, start_N in enumerate(self._blocks(starts) if starts else ()):
            start_N = start_N.astype(np.int64)
            if number == 0 and start_N[0] != 0 and not self._damaged:
                self._say("document_starts", f"begins with {start_N[0]}, not with 0")
            if (np.diff(start_N, prepend=previous) < 0).any():
                self._say("document_starts", "decreases")
                break
            if start_N[-1] > metadata.tokens:
                self._say("document_starts", f"goes up to {start_N[-1]}, beyond the tokens")
                break
            before_C += np.searchsorted(start_N, chunk_start_C)
            # A document is empty if the next one, or the end, has the same place.
            new_N = np.diff(start_N, prepend=previous) > 0
            nonempty += int(np.count_nonzero(new_N & (start_N < metadata.tokens)))
            previous = int(start_N[-1])
        if starts and not self._damaged and metadata.content == "text":
            nonempty += metadata.tokens > 0  # the document at place 0
            self._expect("targets", metadata.targets, metadata.tokens - nonempty)
        comparable = starts is not None and not self._damaged
        firsts = self._array("first_documents", len(chunk_start_C))
        blocks = list(self._blocks(firsts)) if firsts else []
        if firsts and comparable and not self._damaged:
            wrong_C = np.flatnonzero(np.concatenate(blocks).astype(np.int64) != before_C)
            if len(wrong_C):
                self._say("first_documents", f"disagrees with document_starts at {wrong_C[0]}")

    def _verify_mask(self) -> None:
        """Every value is 0 or 1, and as many are 1 as there are targets."""
        self._damaged = False
        mask = self._array(LOSS_MASK, self._metadata.tokens)
        targets, largest = 0, 0
        for block_N in self._blocks(mask) if mask else ():
            targets += int(np.count_nonzero(block_N))
            largest = max(largest, int(block_N.max()))
        if mask and not self._damaged:
            self._expect("targets", self._metadata.targets, targets)
            if largest > 1:
                self._say(LOSS_MASK, f"holds {largest}, which is neither 0 nor 1")

    def _array(self, name: str, length: int) -> _ArrayFiles | None:
        try:
            return _ArrayFiles(self._folder / name, length, digest=self._metadata.digests[name])
        except DamagedDataError as error:
            self._say(name, _cause_of(error))
            self._values.read(length)
            return None

    def _blocks(self, array: _ArrayFiles) -> Iterator[np.ndarray]:
        return array.blocks(self._remember, self._values.read)

    def _remember(self, damage: Damage) -> None:
        self._damaged = True
        self._report(damage)

    def _say(self, name: str, reason: str) -> None:
        self._remember(Damage(self._folder / name, reason))

    def _expect(self, name: str, promised: int, found: int) -> None:
        if promised != found:
            self._say("metadata.json", f"has {name} {promised}, but the arrays have {found}")


def _readable_shards(folder: Path, report: Report) -> Iterator[ShardMetadata]:
    """The shards whose metadata.json can be read, with the others reported."""
    present = shard_folders(folder)
    counts = {number[1] for number in map(shard_number, present) if number}
    expected = counts if len(counts) == 1 else ()  # of several cuts, one does not belong there
    names = {shard_name(shard, count) for count in expected for shard in range(count)}
    for name in sorted(names | {shard.name for shard in present}):
        try:
            yield read_shard(folder / name)
        except FileNotFoundError:
            there = (folder / name).is_dir()
            report(Damage(folder / name, "is unfinished" if there else "is missing"))
        except ValueError as error:
            report(Damage(folder / name, str(error)))
    if not present:
        report(Damage(folder, "holds no shard"))


def _length(metadata: ShardMetadata) -> int:
    """Tokens, their loss mask, and documents; the fourth array is negligible."""
    masked = metadata.content != "text"
    return metadata.tokens * (2 if masked else 1) + metadata.documents


def _verify_tokenizer(file: Path, tokenizer: TokenizerIdentity | None, report: Report) -> None:
    if tokenizer is None or tokenizer.sha256 is None:
        return
    if not file.is_file():
        report(Damage(file, "is missing"))
        return
    if file.stat().st_size > LARGEST_TOKENIZER:
        report(Damage(file, f"has {file.stat().st_size:,} bytes: it is no tokenizer"))
        return
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != tokenizer.sha256:
        report(Damage(file, f"has sha256 {found}, but the tokens were made with another"))


def _verify_seqax(folder: Path, report: Report, progress: Progress) -> None:
    try:
        split = SeqaxSplit(folder)
        encoded = _ArrayFiles(folder / TOKENS, split.tokens, driver="zarr")
    except DamagedDataError as error:
        report(Damage(folder, _cause_of(error)))
        return
    intact = True

    def remember(damage: Damage) -> None:
        nonlocal intact
        intact = False
        report(damage)

    values = _Values(split.tokens, progress)
    documents, largest = 0, -1
    for number, encoded_N in enumerate(encoded.blocks(remember, values.read)):
        if number == 0 and intact and not encoded_N[0] & 1:
            report(Damage(folder / TOKENS, "begins in the middle of a document"))
        documents += int(np.count_nonzero(encoded_N & 1))
        largest = max(largest, int(encoded_N.max() >> 1))
    # Documents without tokens have a start, but no token that could mark it.
    if intact and documents > split.documents:
        reason = f"marks {documents} documents, but {STARTS} has {split.documents}"
        report(Damage(folder / TOKENS, reason))
    if largest > split.max_token_id:
        reason = f"has the id {largest}, but max_token_id is {split.max_token_id}"
        report(Damage(folder / TOKENS, reason))
    _verify_seqax_starts(folder / STARTS, split, report)


def _verify_seqax_starts(path: Path, split: SeqaxSplit, report: Report) -> None:
    try:
        layout = seqax_layout(path)
        sizes = file_sizes(layout)
        check_claim(layout, sizes)
        filtered = read_json(path / ".zarray").get("filters")
    except (OSError, ValueError) as error:
        report(Damage(path, str(error)))
        return
    if filtered:  # as seqax writes it; TensorStore cannot read that
        for number in range(layout.files):
            if str(number) not in sizes:
                report(Damage(path / str(number), "is missing"))
        return
    try:
        starts = _ArrayFiles(path, split.documents + 1, driver="zarr")
    except DamagedDataError as error:
        report(Damage(path, _cause_of(error)))
        return
    last = -1
    for start_N in starts.blocks(report, lambda count: None):
        if (np.diff(start_N.astype(np.int64), prepend=last) < 0).any():
            report(Damage(path, "decreases"))
        last = int(start_N[-1])
    if last != split.tokens:
        report(Damage(path, f"ends with {last}, but there are {split.tokens} tokens"))


def _cause_of(error: Exception) -> str:
    """What TensorStore found wrong, in one line without its settings."""
    return str(error.__cause__ or error).partition(" [")[0]
