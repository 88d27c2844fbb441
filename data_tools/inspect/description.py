"""Describes a split of flat tokens: counts, document lengths, samples.

Shape suffix: N documents.
"""

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_tools.command_line import Progress, no_progress
from data_tools.tokenizer import load_tokenizer
from lmlib.data.stored.data_path import is_seqax_split
from lmlib.data.stored.journal import read_journal
from lmlib.data.stored.metadata import (
    FILE_NAME,
    JOURNAL_FILE,
    TOKENIZER_FILE,
    ShardMetadata,
    SplitMetadata,
    TokenizerIdentity,
    read_shard,
    read_split,
    shard_folders,
    shard_name,
    shard_number,
)
from lmlib.data.stored.seqax import SeqaxSplit
from lmlib.data.stored.split import StoredSplit
from lmlib.data.stored.token_arrays import open_array, reading_context
from lmlib.storage.local_folder import shown

BLOCK_LENGTH = 4 * 1024 * 1024  # tokens; a few tens of megabytes in memory

Decode = Callable[[Sequence[int]], str]


def split_folders(path: Path) -> list[Path]:
    """Returns the splits of the data set `path`, finished or not, or only `path` if it is a split.

    Raises FileNotFoundError for a folder that does not exist, ValueError if it is neither.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no folder {shown(path)}")
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give a data set, or one of its splits")
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


def _is_split(folder: Path) -> bool:
    # A metadata.json without shards is from an older version; reading it raises that error.
    return bool(shard_folders(folder) or is_seqax_split(folder) or (folder / FILE_NAME).is_file())


def usable_decoder(data_set: Path, tokenizer: TokenizerIdentity | None) -> Decode | None:
    """Returns the function from ids of a data set to text.

    None if the data set has no tokenizer, or an unusable one, which prints a line on stderr.
    """
    if tokenizer is not None and tokenizer.name == "bytes" and tokenizer.sha256 is None:
        return load_tokenizer("bytes").decode
    file = data_set / TOKENIZER_FILE
    try:
        return load_tokenizer(str(file)).decode if file.is_file() else None
    except ValueError as error:
        reason = " ".join(str(error).split())
        print(f"ids are shown, since the tokenizer cannot be used: {reason}", file=sys.stderr)
        return None


@dataclass(frozen=True)
class SplitDescription:
    """A split in either format."""

    folder: Path
    format: str  # "lmlib" or "seqax"
    shards: int  # of the finished split
    unfinished: dict[str, int]  # unfinished or missing shards by name, with their tokens on disk
    totals: SplitMetadata  # of the finished shards; unknown entries are None, 0 or empty
    disk_bytes: int  # of all files


def describe_split(folder: Path) -> SplitDescription:
    """Describes the split in `folder` from its metadata; reads no tokens.

    Raises ValueError for metadata that is damaged or of another version, or for shards that do
    not belong together.
    """
    disk_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if is_seqax_split(folder):
        seqax = SeqaxSplit(folder)
        counts = {name: getattr(seqax, name) for name in ("documents", "tokens", "max_token_id")}
        return SplitDescription(folder, "seqax", 1, {}, _totals(**counts), disk_bytes)
    shard_counts = {number[1] for number in map(shard_number, shard_folders(folder)) if number}
    if len(shard_counts) != 1:
        read_split(folder)  # raises the error
    (shards,) = shard_counts
    finished: list[ShardMetadata] = []
    unfinished: dict[str, int] = {}
    settings: Mapping[str, Any] = {}
    for name in (shard_name(shard, shards) for shard in range(shards)):
        if (folder / name / FILE_NAME).exists():
            finished.append(read_shard(folder / name))
            continue
        unfinished[name] = 0
        if (folder / name / JOURNAL_FILE).exists():
            journal = read_journal(folder / name)
            unfinished[name], settings = journal.written, journal.settings
    if not unfinished:
        read_split(folder)  # raises an error if they do not belong together
    totals = SplitMetadata.of(finished) if finished else _totals(**settings)
    return SplitDescription(folder, "lmlib", shards, unfinished, totals, disk_bytes)


def _totals(**known: Any) -> SplitMetadata:
    """Returns the metadata of a split with only some known entries."""
    entries: dict[str, Any] = dict.fromkeys(("gzip_bytes", "tokenizer", "bos_id", "eos_id"))
    entries |= {"content": "text", "vocab_size": 0, "source": {}, "data_set": "", "shards": ()}
    names = {field.name for field in dataclasses.fields(SplitMetadata)} - {"shards"}
    entries |= {name: each for name, each in known.items() if name in names and each is not None}
    if isinstance(entries["tokenizer"], dict):
        entries["tokenizer"] = TokenizerIdentity(**entries["tokenizer"])
    return SplitMetadata(**entries)


def document_lengths(folder: Path, progress: Progress = no_progress) -> Counter[int]:
    """Returns the number of documents of each length in the finished shards of a split.

    Raises DamagedDataError.
    """
    counts: Counter[int] = Counter()
    shards = [shard for shard in shard_folders(folder) if (shard / FILE_NAME).exists()]
    found = {shard: read_shard(shard) for shard in shards}
    total, context, done = sum(each.documents for each in found.values()), reading_context(), 0
    for shard, metadata in found.items():
        digest = metadata.digests["document_starts"]
        starts = open_array(shard / "document_starts", metadata.documents, context, digest)
        for first in range(0, starts.length, BLOCK_LENGTH):
            # One more than the block: the start of the next document, or the end of the tokens.
            stop = min(first + BLOCK_LENGTH, starts.length)
            start_N = starts.read(first, min(stop + 1, starts.length))().astype(np.int64)
            end = [metadata.tokens] if stop == starts.length else []
            counts.update(np.diff(start_N, append=np.array(end, np.int64)).tolist())
            done += stop - first
            progress({"documents": done}, done / total)
    return counts


class Sample(NamedTuple):
    """Consecutive tokens of a split."""

    start: int  # offset of the first token in the split
    begins_document: bool  # True if the first token does
    pieces: list[list[int]]  # the ids, split at document starts


def samples(stored: StoredSplit, count: int, length: int = 100, seed: int = 0) -> list[Sample]:
    """Returns `count` stretches of `length` tokens from random places, determined by `seed`.

    A split shorter than `length` is returned once, whole. Raises DamagedDataError.
    """
    places = max(stored.tokens - length, 0) + 1
    chosen = np.random.default_rng(seed).integers(places, size=count)
    found = []
    for start in np.unique(chosen).tolist():
        tokens, begins, _ = stored.read(start, min(start + length, stored.tokens))()
        pieces = np.split(tokens, np.flatnonzero(begins))
        ids = [piece.tolist() for piece in pieces if len(piece)]
        found.append(Sample(start, bool(begins[:1].any()), ids))
    return found
