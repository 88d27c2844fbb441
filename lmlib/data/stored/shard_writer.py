"""Writes one shard of flat tokens; the format is in docs/flat-tokens.md.

A writer can be killed at any moment. The next one for the same shard takes up the journal, and is
given the documents from `position` on again; the bytes on disk are then those of a writer that
was never disturbed.
"""

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.digests import CHUNK_DIGESTS, digest, digest_of_array, digests_of_chunks
from lmlib.data.stored.growing_array import GrowingArray
from lmlib.data.stored.journal import (
    LOCK_FILE,
    STARTS_FILE,
    Journal,
    NumberFile,
    Totals,
    WriterLock,
    read_journal,
    writing,
)
from lmlib.data.stored.metadata import (
    FILE_NAME,
    JOURNAL_FILE,
    LOSS_MASK,
    TOKENIZER_FILE,
    Content,
    ShardMetadata,
    TokenizerIdentity,
    arrays_of,
    read_shard,
    shard_name,
)
from lmlib.data.stored.shard_checks import (
    check_data_set,
    check_documents,
    check_folder,
    check_neighbours,
    check_same,
    check_settings,
    difference,
)
from lmlib.data.stored.token_arrays import (
    CHUNK_LENGTH,
    FILE_LENGTH,
    INDEX_CHUNK_LENGTH,
    INDEX_FILE_LENGTH,
    append,
    create_array,
)
from lmlib.storage.whole_file import UNFINISHED, write_whole


class ShardWriter:
    """Writes shard number `shard` of the `shards` of a split; `finish` makes it readable."""

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
        """Begins the shard, or goes on with one that was left unfinished with the same settings.

        Args:
          path: the data set's folder.
          content: what the documents are; all but text has a loss mask.
          vocab_size: ids lie in [0, vocab_size).
          bos_id, eos_id: what precedes and follows each document, for the record and `append`.
          tokenizer, source: for the record; `source` in JSON values.
          tokenizer_json: the text of the tokenizer's file, kept beside the splits.
          file_length, chunk_length: tokens in a file, and in its smallest readable part.

        Raises:
          FileExistsError: if the shard is finished, being written, or begun with other settings,
            or its folder holds what no writer put there.
          ValueError: for settings that make no sense, or a tokenizer that is not that of the
            data set's other shards.
        """
        check_settings(vocab_size, bos_id, eos_id, shard, shards, split)
        if chunk_length < 1 or file_length < 1 or file_length % chunk_length:
            raise ValueError(
                f"file_length {file_length} must be a positive multiple of chunk_length "
                f"{chunk_length}"
            )
        path = data_path(path)
        self.folder = path / split / shard_name(shard, shards)
        check_folder(self.folder)
        self._identity: dict[str, Any] = {
            "shard": shard,
            "shards": shards,
            "content": content,
            "vocab_size": vocab_size,
            "tokenizer": tokenizer,
            "bos_id": bos_id,
            "eos_id": eos_id,
            "source": dict(source or {}),
        }
        check_data_set(path, tokenizer_json)
        check_neighbours(path, split, self._identity)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(self.folder)
        identity = self._identity | {"tokenizer": asdict(tokenizer) if tokenizer else None}
        self._journal = Journal(identity | {"lengths": [file_length, chunk_length]})
        shared = {name: value for name, value in identity.items() if name != "shard"}
        self._identity["data_set"] = digest(
            json.dumps(shared | {"split": split}, sort_keys=True).encode()
        )
        self._vocab_size = vocab_size
        self._frame = [np.array([] if i is None else [i], np.int64) for i in (bos_id, eos_id)]
        self._content = content
        self._file_length, self._chunk_length = file_length, chunk_length
        self._dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        try:
            check_folder(self.folder)  # it may have been finished before it was locked
            # With other settings, too, where nothing was written yet that could be lost.
            if (self.folder / JOURNAL_FILE).exists() and read_journal(self.folder).written:
                self._resume()
            else:
                with writing(self.folder):
                    self._begin(path, tokenizer_json)
        except BaseException:
            self._lock.release()
            raise
        self._totals = self._journal.marked
        self._unmarked_lengths: list[np.ndarray] = []
        self._unsaved_starts: list[np.ndarray] = []  # marked, but not in the file yet

    @property
    def position(self) -> Any:
        """Where in the source to go on: what `mark` was last given before the writer was killed."""
        return self._journal.position

    @property
    def totals(self) -> Totals:
        """What the shard holds with all that was appended so far."""
        return self._totals

    def mark(self, position: Any) -> None:
        """Says that the next document is the one at `position` (JSON values) of the source."""
        self._journal = replace(self._journal, position=position, marked=self._totals)
        self._unsaved_starts.append(self._unmarked_starts())
        self._unmarked_lengths = []

    def append(self, tokens: np.ndarray, text_bytes: int, gzip_bytes: int | None = None) -> None:
        """Adds one document: its integer `tokens` without framing, and its text's UTF-8 length.

        `gzip_bytes` is the length of the text under gzip -9; the shard records the total only if
        every document gave one. Raises as `extend` does.
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
        """Adds documents, framed already: their tokens one after the other, and how many each has.

        `tokens` must not change afterwards: it may be kept until it fills a file.

        Args:
          loss_mask: bool, which of the tokens are targets; the first of a document never is.
          left_out: what else came from these rows: `skipped_rows`, `dropped_documents` and others
            of metadata.json, to be added.

        Raises ValueError for a token outside the vocabulary, a loss mask that `content` does not
        have or that is missing, pairs that are not whole, or, after a restart, if these are not
        the documents that were appended before.
        """
        check_documents(self._content, lengths, loss_mask)
        low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, -1)
        if low < 0 or high >= self._vocab_size:
            raise ValueError(
                f"documents from number {self._totals.documents} on have token ids from {low} to "
                f"{high}, outside the vocabulary of {self._vocab_size}: pass the tokenizer's real "
                "vocab_size"
            )
        before = self._totals
        known = before.gzip_bytes is not None and gzip_bytes is not None
        firsts = (np.cumsum(lengths) - lengths)[lengths > 0]
        is_target = np.ones(len(tokens), bool) if loss_mask is None else loss_mask.copy()
        is_target[firsts] = False
        self._totals = before.plus(
            lengths,
            targets=int(np.count_nonzero(is_target)),
            bytes=before.bytes + text_bytes,
            gzip_bytes=before.gzip_bytes + gzip_bytes if known else None,  # type: ignore[operator]
            max_token_id=max(before.max_token_id, high),
            **{name: getattr(before, name) + count for name, count in left_out.items()},
        )
        self._unmarked_lengths.append(lengths)
        values = [tokens] if loss_mask is None else [tokens, is_target]
        for array, elements in zip(self._arrays, values, strict=True):
            array.add(elements, before.tokens)
        buffered = self._arrays[0].buffered
        if buffered >= self._file_length:
            self._write(buffered - buffered % self._file_length)
            with writing(self.folder):
                self._save_starts()
                self._journal.save(self.folder)

    def finish(self) -> ShardMetadata:
        """Writes what is buffered, then metadata.json. No other method works afterwards."""
        self._write(self._arrays[0].buffered)
        self._unsaved_starts.append(self._unmarked_starts())
        with writing(self.folder):
            self._save_starts()
        starts = self._starts.all()
        tokens = self._totals.tokens
        chunk_starts = np.arange(0, tokens + self._chunk_length, self._chunk_length)
        self._write_index("document_starts", starts)
        self._write_index("first_documents", np.searchsorted(starts, chunk_starts))
        digests = {name: digest_of_array(self.folder / name) for name in arrays_of(self._content)}
        metadata = ShardMetadata(**self._identity, **asdict(self._totals), digests=digests)
        with writing(self.folder):
            metadata.write(self.folder)
        remove_leftovers(self.folder)
        self._lock.release()
        return metadata

    def discard(self) -> None:
        """Deletes the unfinished shard, and its split's folder if it holds no other."""
        shutil.rmtree(self.folder)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()
        self._lock.release()

    def close(self) -> None:
        """Lets another writer go on with the shard."""
        self._lock.release()

    def _begin(self, path: Path, tokenizer_json: str | None) -> None:
        if tokenizer_json is not None:
            write_whole(path / TOKENIZER_FILE, tokenizer_json)  # as other shards may
        self._open(None)
        self._journal.save(self.folder)

    def _resume(self) -> None:
        found = read_journal(self.folder)
        for name, value in self._journal.settings.items():
            if found.settings.get(name) != value:
                differing = difference(name, found.settings.get(name), value)
                raise FileExistsError(
                    f"{self.folder} was begun with {differing}: give the same settings, or another "
                    "folder, or delete it"
                )
        self._journal = found
        self._open(found.written)

    def _open(self, written: int | None) -> None:
        documents = self._journal.marked.documents
        self._starts = NumberFile(self.folder / STARTS_FILE, documents, self.folder)
        lengths = {"file_length": self._file_length, "chunk_length": self._chunk_length}
        dtypes = {"tokens": self._dtype, LOSS_MASK: np.uint8}
        self._arrays = [
            GrowingArray(self.folder / name, dtype, written=written, **lengths)
            for name, dtype in dtypes.items()
            if name in arrays_of(self._content)
        ]

    def _write(self, length: int) -> None:
        """Writes the first `length` tokens that are kept, and all that belongs to them."""
        for array in self._arrays:
            array.write(length)
        self._journal = replace(self._journal, written=self._journal.written + length)

    def _save_starts(self) -> None:
        self._starts.append(np.concatenate([np.zeros(0, np.int64), *self._unsaved_starts]))
        self._unsaved_starts = []

    def _unmarked_starts(self) -> np.ndarray:
        lengths = np.concatenate([np.zeros(1, np.int64), *self._unmarked_lengths])
        ends = self._totals.tokens - int(lengths.sum()) + np.cumsum(lengths)
        return ends[:-1]

    def _write_index(self, name: str, values: np.ndarray) -> None:
        array = create_array(
            self.folder / name,
            np.uint64,
            chunk_length=INDEX_CHUNK_LENGTH,
            file_length=INDEX_FILE_LENGTH,
        )
        digests = NumberFile(self.folder / name / CHUNK_DIGESTS, 0, self.folder)
        for start in range(0, len(values), INDEX_FILE_LENGTH):
            piece = values[start : start + INDEX_FILE_LENGTH].astype(np.uint64)
            array = append(self.folder / name, array, piece)
            with writing(self.folder):
                digests.append(digests_of_chunks(piece, INDEX_CHUNK_LENGTH))


def finished_shard(
    path: str | Path,
    split: str,
    shard: int,
    shards: int,
    *,
    tokenizer: TokenizerIdentity,
    source: Mapping[str, Any],
    bos_id: int | None,
    eos_id: int | None,
    content: Content = "text",
) -> ShardMetadata | None:
    """The shard if it is finished, None if not.

    Raises FileExistsError if it was made with other settings; see `ShardWriter`.
    """
    folder = data_path(path) / split / shard_name(shard, shards)
    if not (folder / FILE_NAME).exists():
        return None
    found = read_shard(folder)
    wanted: dict[str, Any] = {"content": content, "tokenizer": tokenizer, "source": source}
    wanted |= {"bos_id": bos_id, "eos_id": eos_id}
    check_same(folder, found, wanted, tuple(wanted))
    remove_leftovers(folder)  # of a writer killed between its last two steps
    return found


def shard_progress(split_folder: Path, shard: int, shards: int) -> tuple[bool, Totals]:
    """Whether a shard is finished, and what it is sure to hold by now."""
    folder = split_folder / shard_name(shard, shards)
    if (folder / FILE_NAME).exists():
        metadata = read_shard(folder)
        return True, Totals(
            **{entry.name: getattr(metadata, entry.name) for entry in fields(Totals)}
        )
    try:
        return False, read_journal(folder).marked
    except FileNotFoundError:
        return False, Totals()


def remove_leftovers(shard_folder: Path) -> None:
    """Removes what only an unfinished shard needs."""
    for file in (
        *(shard_folder / name for name in (JOURNAL_FILE, STARTS_FILE, LOCK_FILE)),
        *shard_folder.glob(f".*{UNFINISHED}"),  # of a killed process, as the next
        *shard_folder.rglob("*.__lock"),  # TensorStore's
    ):
        file.unlink(missing_ok=True)
