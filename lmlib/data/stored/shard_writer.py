"""Writes one shard of flat tokens; the format is in docs/flat-tokens.md.

A writer can be killed at any moment. The next writer of the same shard reads the journal, and is
given the documents from `position` on again. The bytes on disk do not depend on interruptions.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.journal import (
    CHUNK_LENGTH,
    FILE_LENGTH,
    STARTS_FILE,
    FolderWriter,
    GrowingArray,
    NumberFile,
    difference,
    read_journal,
    remove_leftovers,
    writing,
)
from lmlib.data.stored.metadata import (
    ARRAYS,
    FILE_NAME,
    IN_TWOS,
    LOSS_MASK,
    TOKENIZER_FILE,
    Content,
    ShardMetadata,
    TokenizerIdentity,
    Totals,
    arrays_of,
    digest,
    read_shard,
    shard_folders,
    shard_name,
    shard_number,
)
from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.local_folder import shown

INDEX_CHUNK_LENGTH = 1024  # elements of document_starts and first_documents
INDEX_FILE_LENGTH = 1024 * 1024


class ShardWriter(FolderWriter):
    """Writes shard number `shard` of the `shards` of a split; `finish` makes it readable.

    `totals` are the counts with all documents appended so far.
    """

    def __init__(
        self,
        path: str | Path,
        split: str,
        *,
        shard: int = 0,
        shards: int = 1,
        content: Content = "text",
        vocab_size: int,
        bos_id: int | None = None,
        eos_id: int | None = None,
        tokenizer: TokenizerIdentity | None = None,
        tokenizer_json: str | None = None,
        source: Mapping[str, Any] | None = None,
        file_length: int = FILE_LENGTH,
        chunk_length: int = CHUNK_LENGTH,
    ) -> None:
        """Begins the shard, or continues an unfinished one with the same settings.

        Args:
          path: the data set's folder.
          content: the kind of documents; all kinds except text have a loss mask.
          vocab_size: ids are in [0, vocab_size).
          bos_id, eos_id: put before and after each document; recorded, and used by `append`.
          tokenizer, source: recorded; `source` as JSON values.
          tokenizer_json: the text of the tokenizer's file, stored next to the splits.
          file_length, chunk_length: tokens in a file, and in its smallest readable part.

        Raises as `FolderWriter`, and ValueError or FileExistsError for invalid settings, or ones
        that differ from other shards of the data set.
        """
        if not 1 <= vocab_size <= 2**31:
            raise ValueError(f"vocab_size must be in [1, 2**31], not {vocab_size}")
        for name, token_id in (("bos_id", bos_id), ("eos_id", eos_id)):
            if token_id is not None and not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} {token_id} is outside the vocabulary of {vocab_size}")
        if not 0 <= shard < shards <= 99_999:
            raise ValueError(
                f"there is no shard {shard} of {shards}: shards are numbered from 0, and at most "
                "99,999"
            )
        if split in ("", ".", "..") or "/" in split:
            raise ValueError(f"a split is named by a plain folder name, not {split!r}")
        if chunk_length < 1 or file_length < 1 or file_length % chunk_length:
            raise ValueError(
                f"file_length {file_length} must be a positive multiple of chunk_length "
                f"{chunk_length}"
            )
        path = data_path(path)
        shared: dict[str, Any] = {
            "shards": shards,
            "content": content,
            "vocab_size": vocab_size,
            "tokenizer": asdict(tokenizer) if tokenizer else None,
            "bos_id": bos_id,
            "eos_id": eos_id,
            "source": dict(source or {}),
        }
        data_set = digest(json.dumps(shared | {"split": split}, sort_keys=True).encode())
        own: dict[str, Any] = {"tokenizer": tokenizer, "data_set": data_set, "digests": {}}
        self._metadata = ShardMetadata(shard=shard, **shared | own)
        _check_data_set(path, tokenizer_json)
        _check_neighbours(path, split, self._metadata)
        dtypes = {"tokens": np.uint16 if vocab_size <= 2**16 else np.uint32, LOSS_MASK: np.uint8}
        self._unmarked_lengths: list[np.ndarray] = []
        self._unsaved_starts: list[np.ndarray] = []  # marked, but not yet in the file
        super().__init__(
            path / split / shard_name(shard, shards),
            {"shard": shard} | shared | {"lengths": [file_length, chunk_length]},
            {name: dtype for name, dtype in dtypes.items() if name in arrays_of(content)},
            file_length,
            chunk_length,
            others=(STARTS_FILE, *ARRAYS),
        )
        self._frame = [np.array([] if i is None else [i], np.int64) for i in (bos_id, eos_id)]
        self._chunk_length = chunk_length
        self.totals = self._journal.marked
        try:
            if tokenizer_json is not None and not self._journal.written:
                write_atomically(path / TOKENIZER_FILE, tokenizer_json)  # like other shards
            starts = self.folder / STARTS_FILE
            self._starts = NumberFile(starts, self.totals.documents, self.folder)
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> Any:
        """The last position passed to `mark` before the writer was killed; continue there."""
        return self._journal.position

    def mark(self, position: Any) -> None:
        """Records that the next document is the one at `position` (JSON values) of the source."""
        self._journal = replace(self._journal, position=position, marked=self.totals)
        self._unsaved_starts.append(self._unmarked_starts())
        self._unmarked_lengths = []

    def append(self, tokens: np.ndarray, text_bytes: int, gzip_bytes: int | None = None) -> None:
        """Appends one document: its ids without framing, and its text's UTF-8 length.

        `gzip_bytes` is the length of the text under gzip -9; the total is known only if all are.
        """
        document = np.concatenate([self._frame[0], tokens, self._frame[1]])
        self.extend(document, np.array([len(document)]), text_bytes, gzip_bytes)

    def extend(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        text_bytes: int,
        gzip_bytes: int | None = None,
        *,
        loss_mask: np.ndarray | None = None,
        **left_out: int,
    ) -> None:
        """Appends framed documents: their concatenated tokens, and the length of each.

        `tokens` must not change afterwards, since it may be kept until it fills a file.
        `loss_mask`: bool, the targets among the tokens; the first token of a document never is one.
        Of labelled answers it is the label.
        `left_out`: counts added to metadata.json's `skipped_rows`, `dropped_documents` and so on.

        Raises ValueError for a token outside the vocabulary, an unexpected or missing loss mask,
        incomplete pairs, or, after a restart, documents that differ from those appended before.
        """
        _check_documents(self._metadata.content, lengths, loss_mask)
        low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, -1)
        if low < 0 or high >= self._metadata.vocab_size:
            raise ValueError(
                f"documents from number {self.totals.documents} on have token ids from {low} to "
                f"{high}, outside the vocabulary of {self._metadata.vocab_size}: pass the "
                "tokenizer's real vocab_size"
            )
        firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
        is_target = np.ones(len(tokens), bool) if loss_mask is None else loss_mask.copy()
        is_target[firsts] = False
        stored = loss_mask if self._metadata.content == "labelled" else is_target
        start = self.totals.tokens
        self.totals = self.totals + Totals(
            tokens=int(lengths.sum()),
            documents=len(lengths),
            targets=int(np.count_nonzero(is_target)),
            bytes=text_bytes,
            gzip_bytes=gzip_bytes,
            max_token_id=high,
            **left_out,
        )
        self._unmarked_lengths.append(lengths)
        self._add([tokens] if stored is None or loss_mask is None else [tokens, stored], start)

    def _save_journal(self) -> None:
        """See `FolderWriter`; the starts of the marked documents come first."""
        self._save_starts()
        super()._save_journal()

    def finish(self) -> ShardMetadata:
        """Writes the buffered tokens, then metadata.json. No other method works afterwards."""
        self._write()
        self._unsaved_starts.append(self._unmarked_starts())
        self._save_starts()
        starts = self._starts.all()
        chunk_starts = np.arange(0, self.totals.tokens + self._chunk_length, self._chunk_length)
        self._write_index("document_starts", starts)
        self._write_index("first_documents", np.searchsorted(starts, chunk_starts))
        digests = self._digests(arrays_of(self._metadata.content))
        metadata = replace(self._metadata, **vars(self.totals), digests=digests)
        self._finish_folder(metadata)
        return metadata

    def discard(self) -> None:
        """Deletes the unfinished shard, and its split's folder if it holds no other."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()
        self.close()

    def _save_starts(self) -> None:
        if self._unsaved_starts:
            with writing(self.folder):
                self._starts.append(np.concatenate(self._unsaved_starts))
        self._unsaved_starts = []

    def _unmarked_starts(self) -> np.ndarray:
        lengths = np.concatenate([np.zeros(1, np.int64), *self._unmarked_lengths])
        return (self.totals.tokens - int(lengths.sum()) + np.cumsum(lengths))[:-1]

    def _write_index(self, name: str, values: np.ndarray) -> None:
        array = GrowingArray(self.folder / name, np.uint64, INDEX_FILE_LENGTH, INDEX_CHUNK_LENGTH)
        for start in range(0, len(values), INDEX_FILE_LENGTH):
            array.add(values[start : start + INDEX_FILE_LENGTH], start)
            array.write(array.buffered)


def finished_shard(
    path: str | Path, split: str, shard: int, shards: int, *, content: Content = "text", **made: Any
) -> ShardMetadata | None:
    """Returns the shard if it is finished, otherwise None.

    Raises FileExistsError if its metadata.json differs from the entries in `made`.
    """
    folder = data_path(path) / split / shard_name(shard, shards)
    if not (folder / FILE_NAME).exists():
        return None
    found = read_shard(folder)
    _check_same(folder, found, {"content": content, **made})
    remove_leftovers(folder)  # from a writer killed between its last two steps
    return found


def shard_progress(split_folder: Path, shard: int, shards: int) -> tuple[bool, Totals]:
    """Returns True if the shard is finished, and its counts so far."""
    folder = split_folder / shard_name(shard, shards)
    if (folder / FILE_NAME).exists():
        return True, Totals() + read_shard(folder)
    try:
        return False, read_journal(folder).marked
    except FileNotFoundError:
        return False, Totals()


def _check_documents(content: Content, lengths: np.ndarray, loss_mask: np.ndarray | None) -> None:
    """Raises ValueError for documents that don't match `content`."""
    if (loss_mask is None) != (content == "text"):
        wanted = "has no loss mask: leave it out" if content == "text" else "need a loss mask"
        raise ValueError(f"{content} {wanted}")
    if loss_mask is not None and loss_mask.shape != (lengths.sum(),):
        raise ValueError(f"a loss mask of {loss_mask.shape} does not fit {lengths.sum()} tokens")
    if content in IN_TWOS and (len(lengths) % 2 or (lengths < 2).any()):
        raise ValueError(
            f"{len(lengths)} documents of {lengths.tolist()!s:.80} tokens are not pairs: each "
            "pair is two documents of at least two tokens, written together"
        )


def _check_data_set(path: Path, tokenizer_json: str | None) -> None:
    """Raises FileExistsError if `path` is a file, or a data set with another tokenizer."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is not a folder: choose another name for the data set")
    file = path / TOKENIZER_FILE
    if tokenizer_json is None or not file.exists():
        return
    if file.read_bytes() != tokenizer_json.encode():
        raise FileExistsError(
            f"{shown(file)} is not the tokenizer that was asked for: choose another folder, the "
            "same tokenizer, or delete it if you no longer need it"
        )


def _check_neighbours(path: Path, split: str, wanted: ShardMetadata) -> None:
    """Checks that other shards of the split and the data set have matching settings."""
    if (path / split / FILE_NAME).exists():
        raise FileExistsError(
            f"{path / split} holds another {FILE_NAME}, of a data set in another format: choose "
            "another folder, or delete it first"
        )
    for folder in shard_folders(path / split):
        number = shard_number(folder)
        if number is not None and number[1] != wanted.shards:
            raise FileExistsError(
                f"{shown(path / split)} holds {folder.name}, so the split is made of {number[1]} "
                f"shards, not {wanted.shards}: choose another folder, or delete it first"
            )
    for split_folder in sorted({file.parents[1] for file in path.glob(f"*/shard_*/{FILE_NAME}")}):
        folder = next(f for f in shard_folders(split_folder) if (f / FILE_NAME).exists())
        other = read_shard(folder)
        if other.tokenizer != wanted.tokenizer:
            raise ValueError(
                f"{shown(folder)} was made with {other.tokenizer}, not {wanted.tokenizer}: all "
                "splits of a data set share one tokenizer, so choose another folder or the same "
                "tokenizer"
            )
        if split_folder.name == split:
            names = ("content", "vocab_size", "bos_id", "eos_id", "source")
            _check_same(folder, other, {name: getattr(wanted, name) for name in names})


def _check_same(folder: Path, found: ShardMetadata, wanted: Mapping[str, Any]) -> None:
    """Raises FileExistsError if a finished shard was made with other settings."""
    for name, value in wanted.items():
        if getattr(found, name) != value:
            raise FileExistsError(
                f"{shown(folder)} is finished, with "
                f"{difference(name, getattr(found, name), value)}: choose another folder, or "
                "delete it to make it again"
            )
