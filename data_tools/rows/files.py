"""Files on this machine, of any mixture of kinds, as one source of rows."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

from data_tools.rows.block import Block, Field, TextField
from data_tools.rows.compressed import compression
from data_tools.rows.formats import READERS, check_is_read, kind
from data_tools.rows.separated_text import separated_text_blocks
from data_tools.rows.text_files import text_file_blocks


class Files:
    """The rows of files, in order: lines of .jsonl, rows of .parquet and .arrow, whole text files.

    `READERS` has the suffixes. Files of lines and text files may end in .gz or .zst besides. Shards
    are equal shares of the files' bytes: a part of a file that can be read alone (a
    line, a row group, a whole file that is compressed or has separated documents) belongs to the
    shard in whose share it begins.
    """

    def __init__(
        self,
        datasets: Sequence[str],
        *,
        field: Field | None = None,
        pattern: str | None = None,
        document_separator: str | None = None,
    ) -> None:
        """`datasets` are files, and folders of which the files that match the glob `pattern` count,
        sorted by path. With a `document_separator` a text file holds many documents.

        Links to folders inside of a folder are not followed. Names that begin with a dot are left
        out, unless the pattern has one too.
        Raises FileNotFoundError for a path that is not there or a folder without matches, OSError
        for what cannot be listed or is no regular file, ValueError for a path without a name, an
        empty separator, a file that is neither rows nor a text, or, without a pattern, a folder
        that holds both.
        """
        if not datasets or not all(datasets):
            raise ValueError(
                f"the data sets {list(datasets)} hold an empty name: name each of them"
            )
        if document_separator == "":
            raise ValueError("the document separator is empty: give one, or leave it out")
        self.field: Field = field or TextField()
        self._separator = document_separator
        self._datasets, self._pattern = list(datasets), pattern
        self._files = [file for name in datasets for file in _files_of(name, pattern)]
        self._sizes = [file.stat().st_size for file in self._files]
        # One more than its size, so that an empty file lies in a share too.
        self._offsets = [0, *accumulate(size + 1 for size in self._sizes)]

    @property
    def description(self) -> dict[str, Any]:
        """See `RowSource.description`."""
        listing = "".join(
            f"{size} {file}\n" for file, size in zip(self._files, self._sizes, strict=True)
        )
        return {
            "datasets": self._datasets,
            "pattern": "*" if self._pattern is None else self._pattern,
            "text": self.field.description,
            **({} if self._separator is None else {"document_separator": self._separator}),
            "files": len(self._files),
            "bytes": sum(self._sizes),
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }

    @property
    def kinds_of_text(self) -> dict[str, int]:
        """How many text files there are of each suffix, the most frequent first."""
        return dict(Counter(map(kind, filter(_is_text, self._files))).most_common())

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """See `RowSource.blocks`. Raises OSError, naming the file, for what cannot be read."""
        total = self._offsets[-1]
        low, high = total * shard // shards, total * (shard + 1) // shards
        first, inner = position or (0, None)
        shares = [
            _Share(number, min(max(0, low - begin), size + 1), min(max(0, high - begin), size + 1))
            for number, (begin, size) in enumerate(zip(self._offsets, self._sizes, strict=False))
            if number >= first
        ]
        shares = [share for share in shares if share.start < share.stop]

        def placed(block: Block, number: int, inner: Any, last: int, before: int) -> Block:
            """`last` is the file that the block ends in; `before` of its bytes come earlier."""
            done = before if block.fraction is None else block.fraction * (self._sizes[last] + 1)
            fraction = (self._offsets[last] + done - low) / (high - low)
            return replace(block, position=[number, inner], fraction=min(1.0, max(0.0, fraction)))

        def is_document(share: _Share) -> bool:
            return self._separator is None and self._is_text(share.number)

        for are_documents, group in groupby(shares, key=is_document):
            if are_documents:
                numbers = [share.number for share in group if share.start == 0]
                for block in text_file_blocks(self._files[number] for number in numbers):
                    last = numbers[block.position + len(block.paths) - 1]
                    yield placed(block, numbers[block.position], None, last, 0)
                continue
            for number, start, stop in group:
                within = inner if number == first else None
                for rows in self._file_blocks(number, start, stop, within):
                    yield placed(rows, number, rows.position, number, start)

    def _file_blocks(self, number: int, start: int, stop: int, position: Any) -> Iterator[Block]:
        file, size = self._files[number], self._sizes[number]
        if self._is_text(number) and self._separator is not None:
            separator = self._separator.encode("utf-8")
            return (
                separated_text_blocks(file, size, separator, position) if start == 0 else iter(())
            )
        return READERS[kind(file)](file, size, start, stop, position, self.field)

    def _is_text(self, number: int) -> bool:
        return _is_text(self._files[number])


class _Share(NamedTuple):
    """The part of a file, in bytes, that belongs to a shard."""

    number: int
    start: int
    stop: int


def _files_of(name: str, pattern: str | None) -> list[Path]:
    path = Path(os.path.expanduser(name))
    if not path.is_dir():
        found = [path]
    else:
        _check_listable(path)
        glob = "*" if pattern is None else pattern
        found = sorted(
            file
            for file in path.rglob(glob)
            if not file.is_dir()
            and (_is_hidden(Path(glob)) or not _is_hidden(file.relative_to(path)))
        )
        if not found:
            raise FileNotFoundError(f"no file below {path} matches the pattern {glob!r}")
    for file in found:
        if not file.exists():
            link = "it is a link to nothing" if file.is_symlink() else "check its name"
            raise FileNotFoundError(f"there is no file {file}: {link}")
        if not file.is_file():
            raise OSError(f"{file} is no regular file: leave it out")
        check_is_read(file)
    if pattern is None:
        _check_is_uniform(path, found)
    return found


def _check_is_uniform(folder: Path, files: Sequence[Path]) -> None:
    """Raises ValueError for a folder of rows and texts: one of them is hardly meant."""
    texts = [file for file in files if _is_text(file)]
    if texts and len(texts) < len(files):
        rows = next(file for file in files if not _is_text(file))
        pattern = f"*{kind(rows)}{compression(rows)}"
        raise ValueError(
            f"{folder} holds files of rows, such as {rows.name}, and others, such as "
            f"{texts[0].name}, each of which would be a document: name those that are meant, or "
            f"choose them with --pattern={pattern!r}, or all with --pattern='*'"
        )


def _check_listable(path: Path) -> None:
    """Raises OSError for a folder whose content would be missed without a word."""

    def fail(error: OSError) -> None:
        raise OSError(f"{error.filename} cannot be listed: {error.strerror}") from error

    for _ in os.walk(path, onerror=fail):
        pass


def _is_text(file: Path) -> bool:
    return kind(file) not in READERS


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)
