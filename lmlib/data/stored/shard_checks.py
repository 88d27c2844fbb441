"""Checks before a shard is written: the settings make sense, and no other data is in its place."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.journal import LOCK_FILE, STARTS_FILE
from lmlib.data.stored.metadata import (
    ARRAYS,
    FILE_NAME,
    JOURNAL_FILE,
    LOSS_MASK,
    TOKENIZER_FILE,
    Content,
    ShardMetadata,
    read_shard,
    shard_folders,
    shard_number,
)
from lmlib.storage.bucket.copies import shown
from lmlib.storage.whole_file import UNFINISHED


def check_settings(
    vocab_size: int, bos_id: int | None, eos_id: int | None, shard: int, shards: int, split: str
) -> None:
    """Raises ValueError for settings that make no sense."""
    if not 1 <= vocab_size <= 2**31:
        raise ValueError(f"vocab_size must be in [1, 2**31], not {vocab_size}")
    for name, token_id in (("bos_id", bos_id), ("eos_id", eos_id)):
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} {token_id} is outside the vocabulary of {vocab_size}")
    if not 0 <= shard < shards <= 99_999:
        raise ValueError(
            f"there is no shard {shard} of {shards}: shards are numbered from 0, and at most 99,999"
        )
    if split in ("", ".", "..") or "/" in split:
        raise ValueError(f"a split is named by a plain folder name, not {split!r}")


def check_documents(content: Content, lengths: np.ndarray, loss_mask: np.ndarray | None) -> None:
    """Raises ValueError for documents that are not what `content` says."""
    if (loss_mask is None) != (content == "text"):
        wanted = "has no loss mask: leave it out" if content == "text" else "need a loss mask"
        raise ValueError(f"{content} {wanted}")
    if loss_mask is not None and loss_mask.shape != (lengths.sum(),):
        raise ValueError(f"a loss mask of {loss_mask.shape} does not fit {lengths.sum()} tokens")
    if content == "pairs" and (len(lengths) % 2 or (lengths < 2).any()):
        raise ValueError(
            f"{len(lengths)} documents of {lengths.tolist()!s:.80} tokens are no pairs: each is "
            "two documents of at least two tokens, written together"
        )


def check_folder(folder: Path) -> None:
    """Raises FileExistsError for a finished shard, or for what no writer put there."""
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link, and no writer makes any: delete it")
    if not folder.exists():
        return
    if (folder / FILE_NAME).exists():
        raise FileExistsError(f"{folder} is already finished: delete it first to make it again")
    own = {JOURNAL_FILE, STARTS_FILE, LOCK_FILE, LOSS_MASK, *ARRAYS}
    for entry in folder.rglob("*"):
        if entry.is_symlink():
            raise FileExistsError(f"{entry} is a link, and no writer makes any: delete it")
    # A kill leaves what `write_whole` had begun.
    strangers = sorted({one.name for one in folder.iterdir() if one.suffix != UNFINISHED} - own)
    if strangers:
        raise FileExistsError(
            f"{folder} holds {strangers[0]!r}, which is no part of a shard: choose another folder"
        )


def check_data_set(path: Path, tokenizer_json: str | None) -> None:
    """Raises FileExistsError for what is no data set, or one of another tokenizer."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is no folder: choose another name for the data set")
    file = path / TOKENIZER_FILE
    if tokenizer_json is not None and file.exists():
        with open(file, encoding="utf-8", newline="") as stream:
            if stream.read() != tokenizer_json:
                raise FileExistsError(
                    f"{shown(file)} is not the tokenizer that was asked for: choose another "
                    "folder, the same tokenizer, or delete it if it is of no use any more"
                )


def check_neighbours(path: Path, split: str, wanted: Mapping[str, Any]) -> None:
    """Checks that the split's other shards, and the data set's other splits, were made alike."""
    if (path / split / FILE_NAME).exists():
        raise FileExistsError(
            f"{path / split} holds another {FILE_NAME}, of a data set in another format: choose "
            "another folder, or delete it first"
        )
    for folder in shard_folders(path / split):
        number = shard_number(folder)
        if number is not None and number[1] != wanted["shards"]:
            raise FileExistsError(
                f"{shown(path / split)} holds {folder.name}, so the split is made of {number[1]} "
                f"shards, not {wanted['shards']}: choose another folder, or delete it first"
            )
    for split_folder in sorted({file.parents[1] for file in path.glob(f"*/shard_*/{FILE_NAME}")}):
        folder = next(f for f in shard_folders(split_folder) if (f / FILE_NAME).exists())
        other = read_shard(folder)
        if other.tokenizer != wanted["tokenizer"]:
            raise ValueError(
                f"{shown(folder)} was made with {other.tokenizer}, not {wanted['tokenizer']}: all "
                "splits of a data set share one tokenizer, so choose another folder or the same "
                "tokenizer"
            )
        if split_folder.name == split:
            check_same(
                folder, other, wanted, ("content", "vocab_size", "bos_id", "eos_id", "source")
            )


def check_same(
    folder: Path, found: ShardMetadata, wanted: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Raises FileExistsError if a finished shard was made with other settings."""
    for name in names:
        if getattr(found, name) != wanted[name]:
            differing = difference(name, getattr(found, name), wanted[name])
            raise FileExistsError(
                f"{shown(folder)} is finished, with {differing}"
                ": choose another folder, or delete it to make it again"
            )


def difference(name: str, found: Any, wanted: Any) -> str:
    """Where `found` differs from `wanted`; of mappings, the first entry that does."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for entry in (*wanted, *found):
            if found.get(entry) != wanted.get(entry):
                return difference(f"{name} {entry}", found.get(entry), wanted.get(entry))
    return f"{name} {found!r}, not {wanted!r}"
