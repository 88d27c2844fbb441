"""What a split of flat tokens holds: its counts, the lengths of its documents, stretches of it.

Shape suffixes: N documents, L distinct lengths.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.command_line import Progress, no_progress
from data_tools.tokenizer import load_tokenizer
from lmlib.data.stored.journal import read_journal
from lmlib.data.stored.metadata import (
    FILE_NAME,
    JOURNAL_FILE,
    TOKENIZER_FILE,
    Content,
    ShardMetadata,
    TokenizerIdentity,
    read_shard,
    read_split,
    shard_folders,
    shard_name,
    shard_number,
)
from lmlib.data.stored.seqax import SeqaxSplit, is_seqax_split
from lmlib.data.stored.split import StoredSplit
from lmlib.data.stored.token_arrays import StoredArray, reading_context
from lmlib.storage.bucket.copies import shown

BLOCK_LENGTH = 4 * 1024 * 1024  # tokens; a few tens of megabytes in memory

# Counts that a split has from its shards.
_SUMMED = (
    "skipped_rows",
    "targets",
    "dropped_documents",
    "dropped_tokens",
    "cut_documents",
    "cut_tokens",
)


def split_folders(path: Path) -> list[Path]:
    """The splits of the data set `path`, finished or not, or `path` alone if it is a split.

    Raises FileNotFoundError for a folder that is not there, ValueError if it is neither.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no folder {shown(path)}")
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: give a data set, or one of its splits")
    if shard_number(path):
        raise ValueError(f"{path} is one shard: give its split, {path.parent}")
    if _is_split(path):
        return [path]
    found = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and _is_split(entry)]
    if not found:
        raise ValueError(
            f"{shown(path)} is neither a data set of flat tokens nor a split of one; if it holds "
            "text, pretokenize it first with python -m data_tools.pretokenize "
            f"--dataset={shlex.quote(str(path))} --tokenizer=… --out=…"
        )
    return found


def open_split(folder: Path) -> StoredSplit | SeqaxSplit:
    """The finished split in `folder`, of either format; raises as `StoredSplit` does."""
    return SeqaxSplit(folder) if is_seqax_split(folder) else StoredSplit(folder)


def blocks(
    stored: StoredSplit | SeqaxSplit, start: int = 0, length: int = BLOCK_LENGTH
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens from `start` on, `length` at a time, and whether each begins a document.

    The next block is on its way while one is used. Raises DamagedDataError.
    """
    pending = None
    for block_start in range(start, stored.tokens, length):
        coming = stored.read(block_start, min(block_start + length, stored.tokens))
        if pending is not None:
            yield pending.result()[:2]
        pending = coming
    if pending is not None:
        yield pending.result()[:2]


def _is_split(folder: Path) -> bool:
    # A metadata.json without shards is of an older version, which reading it will say.
    return bool(shard_folders(folder) or is_seqax_split(folder) or (folder / FILE_NAME).is_file())


Decode = Callable[[Sequence[int]], str]


def decoder(path: Path, tokenizer: TokenizerIdentity | None) -> Decode | None:
    """What turns ids of the data set `path` into text; None if it keeps no tokenizer.

    Raises ValueError if its tokenizer.json is not valid.
    """
    if tokenizer is not None and tokenizer.name == "bytes" and tokenizer.sha256 is None:
        return load_tokenizer("bytes").decode
    file = path / TOKENIZER_FILE
    return load_tokenizer(str(file)).decode if file.is_file() else None


@dataclass(frozen=True)
class UnfinishedShard:
    """A shard that a writer has begun, or that a split still lacks."""

    name: str
    tokens: int  # on disk so far


@dataclass(frozen=True)
class SplitDescription:
    """A split in either format; the totals are those of its finished shards."""

    folder: Path
    format: str  # "lmlib" or "seqax"
    shards: int  # that the split is made of when it is finished
    unfinished: tuple[UnfinishedShard, ...]
    documents: int
    tokens: int
    bytes: int | None  # of UTF-8 text; None if unknown
    gzip_bytes: int | None  # of the documents, each alone under gzip -9; None if not measured
    skipped_rows: int
    content: Content
    targets: int  # 0 if unknown, as the next ones
    dropped_documents: int
    dropped_tokens: int
    cut_documents: int
    cut_tokens: int
    vocab_size: int | None  # None if unknown
    max_token_id: int  # -1 if there are no tokens
    tokenizer: TokenizerIdentity | None
    bos_id: int | None
    eos_id: int | None
    source: Mapping[str, Any]
    disk_bytes: int  # of all files

    @property
    def finished(self) -> bool:
        """Whether all shards are there."""
        return not self.unfinished


def describe_split(folder: Path) -> SplitDescription:
    """Describes the split in `folder` from its metadata; reads no tokens.

    Raises ValueError for metadata that is damaged or of another version, or for shards that do
    not belong together.
    """
    disk_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if is_seqax_split(folder):
        return _describe_seqax(folder, disk_bytes)
    counts = {number[1] for number in map(shard_number, shard_folders(folder)) if number}
    if len(counts) != 1:
        read_split(folder)  # says what is wrong
    shards = counts.pop()
    names = [shard_name(shard, shards) for shard in range(shards)]
    finished = [read_shard(folder / name) for name in names if (folder / name / FILE_NAME).exists()]
    unfinished = [name for name in names if not (folder / name / FILE_NAME).exists()]
    if not unfinished:
        read_split(folder)  # do they belong together?
    known_bytes = sum(shard.bytes for shard in finished)
    gzip_bytes = [shard.gzip_bytes for shard in finished if shard.gzip_bytes is not None]
    settings = _settings(folder, finished, unfinished)
    return SplitDescription(
        folder=folder,
        format="lmlib",
        shards=shards,
        unfinished=tuple(UnfinishedShard(name, _written(folder / name)) for name in unfinished),
        documents=sum(shard.documents for shard in finished),
        tokens=sum(shard.tokens for shard in finished),
        bytes=known_bytes or None,
        gzip_bytes=sum(gzip_bytes) if finished and len(gzip_bytes) == len(finished) else None,
        **{name: sum(getattr(shard, name) for shard in finished) for name in _SUMMED},
        max_token_id=max((shard.max_token_id for shard in finished), default=-1),
        disk_bytes=disk_bytes,
        **settings,
    )


def _describe_seqax(folder: Path, disk_bytes: int) -> SplitDescription:
    split = SeqaxSplit(folder)
    return SplitDescription(
        folder=folder,
        format="seqax",
        shards=1,
        unfinished=(),
        documents=split.documents,
        tokens=split.tokens,
        bytes=None,
        gzip_bytes=None,
        content="text",
        **dict.fromkeys(_SUMMED, 0),
        vocab_size=None,
        max_token_id=split.max_token_id,
        tokenizer=None,
        bos_id=None,
        eos_id=None,
        source={},
        disk_bytes=disk_bytes,
    )


def _settings(folder: Path, finished: list[ShardMetadata], unfinished: list[str]) -> dict[str, Any]:
    """What all shards share, from a finished one or else from the journal of one begun."""
    names = ("content", "vocab_size", "tokenizer", "bos_id", "eos_id", "source")
    if finished:
        return {name: getattr(finished[0], name) for name in names}
    begun = [name for name in unfinished if (folder / name / JOURNAL_FILE).exists()]
    settings = dict(read_journal(folder / begun[0]).settings) if begun else {}
    found = {name: settings.get(name) for name in names}
    tokenizer = found["tokenizer"]
    return found | {
        "content": found["content"] or "text",
        "tokenizer": None if tokenizer is None else TokenizerIdentity(**tokenizer),
        "source": found["source"] or {},
    }


def _written(shard_folder: Path) -> int:
    """Tokens that an unfinished shard holds on disk; none if it has not been begun."""
    if not (shard_folder / JOURNAL_FILE).exists():
        return 0
    return read_journal(shard_folder).written


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
        starts = StoredArray(
            shard / "document_starts",
            metadata.documents,
            context,
            digest=metadata.digests["document_starts"],
        )
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


@dataclass(frozen=True)
class Sample:
    """Consecutive tokens of a split."""

    start: int  # of the first, in the split
    begins_document: bool  # whether the first one does
    pieces: tuple[tuple[int, ...], ...]  # the ids, cut where a document begins

    @property
    def stop(self) -> int:
        return self.start + sum(map(len, self.pieces))


def samples(
    stored: StoredSplit | SeqaxSplit, count: int, length: int = 100, seed: int = 0
) -> list[Sample]:
    """`count` stretches of `length` tokens from random places; the same `seed`, the same places.

    A split shorter than `length` gives itself once. Raises DamagedDataError.
    """
    places = max(stored.tokens - length, 0) + 1
    chosen = np.random.default_rng(seed).integers(places, size=count)
    return [_sample(stored, start, length) for start in np.unique(chosen).tolist()]


def _sample(stored: StoredSplit | SeqaxSplit, start: int, length: int) -> Sample:
    tokens, begins, _ = stored.read(start, min(start + length, stored.tokens)).result()
    pieces = [piece for piece in np.split(tokens, np.flatnonzero(begins)) if len(piece)]
    return Sample(
        start=start,
        begins_document=bool(begins[:1].any()),
        pieces=tuple(tuple(piece.tolist()) for piece in pieces),
    )
