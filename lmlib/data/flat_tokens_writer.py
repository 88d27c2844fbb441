"""Writes documents' tokens as a split of flat tokens; the format is in docs/flat-tokens.md."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.metadata import (
    FILE_NAME,
    Metadata,
    Shard,
    TokenizerIdentity,
    read_metadata,
    write_durably,
)
from lmlib.data.token_arrays import CHUNK_LENGTH, FILE_LENGTH, append, create_array

TOKENIZER_FILE = "tokenizer.json"


class FlatTokensWriter:
    """Writes one split, document by document; `finish` makes it readable.

    A split left unfinished is removed by the next writer of the same split, which starts again.
    """

    def __init__(
        self,
        path: str | Path,
        split: str,
        *,
        vocab_size: int,
        bos_id: int | None = None,
        eos_id: int | None = None,
        tokenizer: TokenizerIdentity | None = None,
        tokenizer_json: str | None = None,
        source: Mapping[str, Any] | None = None,
        max_shard_tokens: int = 2**30,
        file_length: int = FILE_LENGTH,
        chunk_length: int = CHUNK_LENGTH,
    ) -> None:
        """Creates `path`/`split`, whose documents will each be framed by `bos_id` and `eos_id`.

        `tokenizer_json` is the text of the tokenizer's file, kept beside the splits. A shard ends
        with the document that reaches `max_shard_tokens`, so documents are never split.

        Raises FileExistsError if the split is already finished, or if its folder holds anything
        but an unfinished split; ValueError if the data set's other splits were made with another
        tokenizer, or for sizes that do not fit together.
        """
        if not 1 <= vocab_size <= 2**31:
            raise ValueError(f"vocab_size must be in [1, 2**31], not {vocab_size}")
        for name, token_id in (("bos_id", bos_id), ("eos_id", eos_id)):
            if token_id is not None and not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} {token_id} is outside the vocabulary of {vocab_size}")
        if chunk_length < 1 or file_length < 1 or file_length % chunk_length:
            raise ValueError(
                f"file_length {file_length} must be a positive multiple of chunk_length "
                f"{chunk_length}"
            )
        if max_shard_tokens < 1:
            raise ValueError(f"max_shard_tokens must be at least 1, not {max_shard_tokens}")
        if split in ("", ".", "..") or "/" in split:
            raise ValueError(f"a split is named by a plain folder name, not {split!r}")

        self._folder = Path(path) / split
        _remove_unfinished(self._folder)
        _check_same_tokenizer(Path(path), tokenizer)
        self._folder.mkdir(parents=True)
        if tokenizer_json is not None:
            write_durably(Path(path) / TOKENIZER_FILE, tokenizer_json)

        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._bos_id, self._eos_id = bos_id, eos_id
        self._prefix = np.array([] if bos_id is None else [bos_id], np.int64)
        self._suffix = np.array([] if eos_id is None else [eos_id], np.int64)
        self._source = dict(source or {})
        self._max_shard_tokens = max_shard_tokens
        self._file_length, self._chunk_length = file_length, chunk_length
        self._dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self._shards: list[Shard] = []
        self._bytes = 0
        self._gzip_bytes: int | None = 0
        self._max_token_id = -1
        self._begin_shard()

    def append(self, tokens: np.ndarray, text_bytes: int, gzip_bytes: int | None = None) -> None:
        """Adds one document: its integer `tokens` without framing, and its text's UTF-8 length.

        `gzip_bytes` is the length of the text under gzip -9; the split records the total only if
        every document gave one. Raises ValueError for a token outside the vocabulary.
        """
        document = np.concatenate([self._prefix, tokens, self._suffix])
        if document.size:
            low, high = int(document.min()), int(document.max())
            if low < 0 or high >= self._vocab_size:
                raise ValueError(
                    f"document {self.documents} has token ids from {low} to {high}, outside the "
                    f"vocabulary of {self._vocab_size}: pass the tokenizer's real vocab_size"
                )
            self._max_token_id = max(self._max_token_id, high)
        if self._shard_tokens >= self._max_shard_tokens:
            self._end_shard()
            self._begin_shard()

        self._starts.append(self._shard_tokens)
        self._shard_tokens += len(document)
        self._buffer.append(document.astype(self._dtype))
        self._buffered += len(document)
        self._bytes += text_bytes
        if self._gzip_bytes is not None and gzip_bytes is not None:
            self._gzip_bytes += gzip_bytes
        else:
            self._gzip_bytes = None
        if self._buffered >= self._file_length:
            self._write_buffer(self._buffered - self._buffered % self._file_length)

    @property
    def tokens(self) -> int:
        """Tokens appended so far, framing included."""
        return sum(shard.tokens for shard in self._shards) + self._shard_tokens

    @property
    def documents(self) -> int:
        """Documents appended so far."""
        return sum(shard.documents for shard in self._shards) + len(self._starts)

    def finish(self) -> Metadata:
        """Writes what is buffered, then metadata.json; raises ValueError if there are no tokens."""
        if self.tokens == 0:
            raise ValueError(
                f"nothing to write to {self._folder}: {self.documents} documents held no tokens; "
                "check where the documents come from"
            )
        self._end_shard()
        metadata = Metadata(
            shards=tuple(self._shards),
            tokens=self.tokens,
            documents=self.documents,
            bytes=self._bytes,
            gzip_bytes=self._gzip_bytes,
            vocab_size=self._vocab_size,
            max_token_id=self._max_token_id,
            tokenizer=self._tokenizer,
            bos_id=self._bos_id,
            eos_id=self._eos_id,
            source=self._source,
        )
        metadata.write(self._folder)
        return metadata

    def _begin_shard(self) -> None:
        self._shard_name = f"shard_{len(self._shards):05d}"
        self._tokens_array = self._create("tokens", self._dtype)
        self._shard_tokens = 0
        self._starts: list[int] = []
        self._buffer: list[np.ndarray] = []
        self._buffered = 0

    def _end_shard(self) -> None:
        self._write_buffer(self._buffered)
        starts_array = self._create("document_starts", np.uint64)
        append(starts_array, np.array(self._starts, np.uint64))
        self._shards.append(Shard(self._shard_name, self._shard_tokens, len(self._starts)))
        self._shard_tokens, self._starts = 0, []

    def _create(self, name: str, dtype: type[np.unsignedinteger]) -> Any:
        return create_array(
            self._folder / self._shard_name / name,
            dtype,
            chunk_length=self._chunk_length,
            file_length=self._file_length,
        )

    def _write_buffer(self, length: int) -> None:
        """Writes the first `length` buffered tokens and keeps the rest."""
        buffered = np.concatenate([*self._buffer, np.array([], self._dtype)])
        if length:
            self._tokens_array = append(self._tokens_array, buffered[:length])
        self._buffer, self._buffered = [buffered[length:]], len(buffered) - length


def _remove_unfinished(folder: Path) -> None:
    if not folder.exists():
        return
    if (folder / FILE_NAME).exists():
        raise FileExistsError(f"{folder} is already finished: delete it first to make it again")
    # Never delete what no writer put there.
    strangers = [
        entry.name
        for entry in folder.iterdir()
        if not entry.name.startswith("shard_") and entry.name != f"{FILE_NAME}.tmp"
    ]
    if strangers:
        raise FileExistsError(
            f"{folder} holds {strangers[0]!r}, which is no part of a split: choose another folder"
        )
    shutil.rmtree(folder)


def _check_same_tokenizer(path: Path, tokenizer: TokenizerIdentity | None) -> None:
    for file in sorted(path.glob(f"*/{FILE_NAME}")):
        other = read_metadata(file.parent).tokenizer
        if other != tokenizer:
            raise ValueError(
                f"{file.parent} was made with {other}, not {tokenizer}: all splits of a data set "
                "share one tokenizer, so choose another folder or the same tokenizer"
            )
