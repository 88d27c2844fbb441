"""What a split of flat tokens says of itself, also while it is being written."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmlib.data.journal import read_journal
from lmlib.data.metadata import (
    FILE_NAME,
    JOURNAL_FILE,
    ShardMetadata,
    TokenizerIdentity,
    read_shard,
    read_split,
    shard_folders,
    shard_name,
    shard_number,
)
from lmlib.data.seqax import SeqaxSplit, is_seqax_split


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
        skipped_rows=sum(shard.skipped_rows for shard in finished),
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
        skipped_rows=0,
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
    names = ("vocab_size", "tokenizer", "bos_id", "eos_id", "source")
    if finished:
        return {name: getattr(finished[0], name) for name in names}
    begun = [name for name in unfinished if (folder / name / JOURNAL_FILE).exists()]
    settings = dict(read_journal(folder / begun[0]).settings) if begun else {}
    found = {name: settings.get(name) for name in names}
    tokenizer = found["tokenizer"]
    return found | {
        "tokenizer": None if tokenizer is None else TokenizerIdentity(**tokenizer),
        "source": found["source"] or {},
    }


def _written(shard_folder: Path) -> int:
    """Tokens that an unfinished shard holds on disk; none if it has not been begun."""
    if not (shard_folder / JOURNAL_FILE).exists():
        return 0
    return read_journal(shard_folder).written
