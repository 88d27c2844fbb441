"""Converts tokens of other libraries to this library's, for `python -m data_tools.convert`."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data_tools.command_line import Progress, no_progress
from data_tools.tokenizer import Tokenizer
from lmlib.data.stored.data_path import data_path, is_seqax_split
from lmlib.data.stored.journal import FILE_LENGTH
from lmlib.data.stored.metadata import (
    FILE_NAME,
    TOKENIZER_FILE,
    DamagedDataError,
    ShardMetadata,
    read_shard,
    shard_name,
)
from lmlib.data.stored.seqax import SeqaxSplit
from lmlib.data.stored.shard_writer import ShardWriter

BLOCK_LENGTH = 4 * 1024 * 1024  # tokens; a few tens of megabytes in memory


class TokenSplit(Protocol):
    """The documents of a split, one after the other."""

    tokens: int
    documents: int
    max_token_id: int

    def read(self, start: int, stop: int) -> Callable[[], tuple[np.ndarray, np.ndarray, Any]]:
        """Returns a function that returns tokens [start, stop), and where documents begin (bool).

        Its third result is not used.
        """


def seqax_splits(source: Path) -> dict[str, TokenSplit]:
    """Returns the splits of a folder in seqax's format.

    Raises FileNotFoundError for a missing folder, ValueError if it has no such split,
    DamagedDataError if it cannot be read.
    """
    if not source.is_dir():
        prefix = source.with_suffix("") if source.suffix in (".bin", ".idx") else source
        raise FileNotFoundError(
            f"there is neither a folder {source}, for seqax, nor both files {prefix}.bin and "
            f"{prefix}.idx, for Megatron"
        )
    folders = [entry for entry in sorted(source.iterdir()) if is_seqax_split(entry)]
    if not folders:
        raise ValueError(f"{source} has no split in seqax's format, such as {source / 'train'}")
    return {folder.name: SeqaxSplit(folder) for folder in folders}


def to_lmlib(
    splits: Mapping[str, TokenSplit],
    source: Path,
    out: Path,
    *,
    converted_from: str,
    tokenizer: Tokenizer | None = None,
    progress: Progress = no_progress,
    file_length: int = FILE_LENGTH,
    block_length: int = BLOCK_LENGTH,
) -> dict[Path, tuple[ShardMetadata, int]]:
    """Converts each of the `splits` of `source` to a split with one shard below `out`.

    Returns the shard of each new split, and the number of documents dropped because they have no
    tokens. The new splits have no BOS and EOS, and 0 bytes of text. Without `tokenizer`, none is
    recorded and the vocabulary ends at the largest id. After a kill, the same call continues.
    `converted_from` names the format, for the record.

    Raises FileExistsError if `out` is finished or holds anything else, ValueError for ids outside
    the vocabulary, DamagedDataError if the source cannot be read.
    """
    source, out = data_path(source), data_path(out)
    largest = max(split.max_token_id for split in splits.values())
    vocab_size = largest + 1 if tokenizer is None else tokenizer.vocab_size
    if vocab_size <= largest:
        raise ValueError(
            f"{source} has ids up to {largest}, but the tokenizer's end at {vocab_size - 1}: give "
            "the tokenizer that made them"
        )
    _check_out(out, list(splits))
    converted = {}
    for name, split in splits.items():
        folder = out / name
        described = {"converted from": converted_from, "path": str(source), "split": name}
        if not (folder / shard_name(0, 1) / FILE_NAME).exists():  # else it was done before the kill
            writer = ShardWriter(
                out,
                name,
                vocab_size=vocab_size,
                tokenizer=None if tokenizer is None else tokenizer.identity,
                tokenizer_json=None if tokenizer is None else tokenizer.tokenizer_json,
                source=described,
                file_length=file_length,
                chunk_length=min(file_length, 32 * 1024),
            )
            try:
                done = writer.position or 0  # tokens, up to the end of a document
                pieces = _whole_documents(split, source / name, done, block_length)
                for tokens, lengths in pieces:
                    writer.extend(tokens, lengths, text_bytes=0)
                    done += len(tokens)
                    writer.mark(done)
                    progress({"tokens": done}, done / split.tokens)
                writer.finish()
            finally:
                writer.close()
        written = read_shard(folder / shard_name(0, 1))
        if written.source != described:
            raise FileExistsError(f"{folder} was made from {dict(written.source)}")
        converted[folder] = written, split.documents - written.documents
    return converted


def _whole_documents(
    split: TokenSplit, folder: Path, start: int, block_length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields tokens (int64) of complete documents from `start` on, and the documents' lengths."""
    begun: list[np.ndarray] = []  # the unfinished document
    for block_start in range(start, split.tokens, block_length):
        stop = min(block_start + block_length, split.tokens)
        tokens, begins, _ = split.read(block_start, stop)()
        if not begun and not begins[0]:
            raise DamagedDataError(f"{folder} begins in the middle of a document")
        starts = np.flatnonzero(begins)
        if len(starts) and (begun or len(starts) > 1):
            complete = np.concatenate([*begun, tokens[: starts[-1]]]).astype(np.int64)
            begin = np.zeros(1 if begun else 0, np.int64)  # start of the unfinished document
            yield complete, np.diff(starts + len(complete) - starts[-1], prepend=begin)
            begun = []
        begun.append(tokens[starts[-1] :] if len(starts) else tokens)
    if begun:
        last = np.concatenate(begun).astype(np.int64)
        yield last, np.array([len(last)])


def _check_out(out: Path, splits: list[str]) -> None:
    """Checks that `out` holds only finished splits, and files begun by this conversion."""
    if not out.exists():
        return
    shards = [out / split / shard_name(0, 1) for split in splits]
    finished = {file.parents[1] for file in out.glob(f"*/shard_*/{FILE_NAME}")}
    others = finished - {shard.parent for shard in shards}
    own = {out / TOKENIZER_FILE, *(out / split for split in splits), *shards, *others}
    entries = [*out.iterdir(), *(entry for split in splits for entry in (out / split).glob("*"))]
    begun = others or any(shard.is_dir() for shard in shards)
    if not begun or set(entries) - own or all((shard / FILE_NAME).exists() for shard in shards):
        raise FileExistsError(f"{out} exists already: choose another folder")
