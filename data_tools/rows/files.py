"""Local files of mixed formats as one source of rows.

`READERS` has the formats of rows; a file with another suffix is a text.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from data_tools.rows.array_record import ARRAY_RECORD, array_record_blocks
from data_tools.rows.arrow import ARROW, PARQUET, arrow_blocks
from data_tools.rows.block import BLOCK_BYTES, MAX_ROW_BYTES, Block, Field, Row, TextField
from data_tools.rows.compressed import compression, kind, opened
from data_tools.rows.delimited import DELIMITERS, delimited_blocks
from data_tools.rows.mosaic import INDEX, MOSAIC, mosaic_blocks
from data_tools.rows.records import documents_blocks, lines_blocks, text_row
from data_tools.rows.webdataset import WEBDATASET, webdataset_blocks

# Takes the file, its size, bytes `start` and `stop` (up to size + 1), the position of a block or
# `None`, and the field of the text. Yields the blocks that begin between `start` and `stop`, from
# the one at that position on. A part that cannot be divided begins at byte 0.
Reader = Callable[[Path, int, int, int, Any, Field], Iterator[Block]]
READERS: dict[str, Reader] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json", ".jsonlines", ".jl"), lines_blocks),
    **dict.fromkeys((*PARQUET, *ARROW), arrow_blocks),
    **dict.fromkeys(DELIMITERS, delimited_blocks),
    **dict.fromkeys(MOSAIC, mosaic_blocks),
    **dict.fromkeys(WEBDATASET, webdataset_blocks),
    **dict.fromkeys(ARRAY_RECORD, array_record_blocks),
}
_NOT_COMPRESSED = (*PARQUET, *ARROW, *ARRAY_RECORD)  # these read parts of a file

# Suffixes of files that are neither rows nor texts, by the remedy in the error.
_REFUSED = {
    "write its rows as JSON Lines or Parquet": (
        ".psv .xls .xlsx .ods .avro .orc .tfrecord .warc .wet .wat .db .sqlite .sqlite3 "
        ".h5 .hdf5 .npy .npz .pkl .pickle .pt .safetensors"
    ),
    "unpack it, or compress it as .gz or .zst instead": (
        ".bz2 .xz .lzma .lz4 .br .z .zip .7z .rar .tgz .tbz2 .txz"
    ),
    "write its text as a text file": ".pdf .doc .docx .odt .rtf .epub",
    "it has the name of an unfinished file: finish it, or leave it out": (
        ".tmp .temp .part .partial .crdownload .incomplete"
    ),
}
_ADVICE = {suffix: advice for advice, suffixes in _REFUSED.items() for suffix in suffixes.split()}


def may_be_file(name: str) -> bool:
    """True if the name ends like a file's."""
    known = {*READERS, *_ADVICE, ".txt", ".py", ".md"}
    return bool(compression(Path(name))) or kind(Path(name)) in known


class Files:
    """The rows of files, in order, by `READERS`; a text file is one row.

    Most may also end in .gz or .zst. Shards are equal shares of the files'
    bytes. A part of a file that can be read independently (a line, a row group, a whole file that
    is compressed or has separated documents) belongs to the shard in whose share it begins.
    """

    def __init__(
        self,
        datasets: Sequence[str],
        *,
        field: Field | None = None,
        pattern: str | None = None,
        document_separator: str | None = None,
    ) -> None:
        """Finds the files of `datasets`, and files that match `pattern` in its folders.

        With a `document_separator` a text file holds many documents. Names that begin with a dot
        are skipped, unless the pattern has one too. Raises OSError for paths that cannot be read,
        ValueError for an empty name or separator, a file that is neither rows nor a text, or,
        without a pattern, a folder that holds both.
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
        # One more than its size, so that an empty file belongs to a share too.
        self._offsets = [0, *accumulate(size + 1 for size in self._sizes)]

    @property
    def description(self) -> dict[str, Any]:
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

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """See `RowSource.blocks`. Raises OSError, naming the file, if one cannot be read."""
        total = self._offsets[-1]
        low, high = total * shard // shards, total * (shard + 1) // shards
        first, inner = position or (0, None)
        shares = [  # file, and its first and last byte of this shard
            (number, max(0, low - begin), min(high - begin, self._sizes[number] + 1))
            for number, begin in enumerate(self._offsets[:-1])
            if number >= first
        ]
        shares = [share for share in shares if share[1] < share[2]]

        def placed(block: Block, number: int, inner: Any, last: int, done: float) -> Block:
            """`done` bytes of file number `last` were read at the end of the block."""
            fraction = (self._offsets[last] + done - low) / (high - low)
            fraction = min(1.0, max(0.0, fraction))
            return block._replace(position=[number, inner], fraction=fraction)

        def is_document(share: tuple[int, int, int]) -> bool:
            return self._separator is None and _is_text(self._files[share[0]])

        for are_documents, group in groupby(shares, key=is_document):
            if are_documents:
                numbers = [number for number, start, _ in group if start == 0]
                for block in _text_files_blocks([self._files[number] for number in numbers]):
                    last = numbers[block.position + len(block.content) - 1]
                    done = self._sizes[last] + 1
                    yield placed(block, numbers[block.position], None, last, done)
                continue
            for number, start, stop in group:
                within = inner if number == first else None
                for block in self._file_blocks(number, start, stop, within):
                    done = start
                    if block.fraction is not None:
                        done = block.fraction * (self._sizes[number] + 1)
                    yield placed(block, number, block.position, number, done)

    def _file_blocks(self, number: int, start: int, stop: int, position: Any) -> Iterator[Block]:
        file, size = self._files[number], self._sizes[number]
        if not _is_text(file):
            return READERS[kind(file)](file, size, start, stop, position, self.field)
        assert self._separator is not None
        return documents_blocks(file, self._separator.encode(), position) if not start else iter(())


def _text_files_blocks(files: Sequence[Path]) -> Iterator[Block]:
    """Yields the files, several per block if they are small; `position` counts those before it."""
    first, texts, read_bytes = 0, [], 0
    for number, file in enumerate(files, start=1):
        content = _content(file)
        texts.append((str(file), content))
        read_bytes += len(content or b"")
        if read_bytes >= BLOCK_BYTES or number == len(files):
            yield Block(first, 1.0, read_bytes, texts, _rows)
            first, texts, read_bytes = number, [], 0


def _rows(content: list[tuple[str, bytes | None]], field: Field) -> Iterator[Row]:
    for path, text in content:
        yield text_row(text, path, path, field)


def _content(path: Path) -> bytes | None:
    """Returns all bytes, decompressed; None if there are too many."""
    content = bytearray()
    with opened(path) as stream:
        while piece := stream.read(BLOCK_BYTES):
            content += piece
            if len(content) > MAX_ROW_BYTES:
                return None
    return bytes(content)


def _files_of(name: str, pattern: str | None) -> list[Path]:
    path = Path(os.path.expanduser(name))
    found = [path]
    if path.is_dir():
        glob = pattern or "*"
        for _ in os.walk(path, onerror=_fail_to_list):
            pass
        found = sorted(
            file
            for file in path.rglob(glob)
            if not file.is_dir()
            and (_is_hidden(Path(glob)) or not _is_hidden(file.relative_to(path)))
        )
        # MDS shards describe themselves, so their index is not needed.
        folders = {file.parent for file in found if kind(file) in MOSAIC}
        found = [file for file in found if file.name != INDEX or file.parent not in folders]
        if not found:
            raise FileNotFoundError(f"no file below {path} matches the pattern {glob!r}")
    for file in found:
        _check_is_read(file)
    texts = [file for file in found if _is_text(file)]
    if pattern is None and 0 < len(texts) < len(found):  # one of the kinds is probably unintended
        rows = next(file for file in found if not _is_text(file))
        raise ValueError(
            f"{path} holds files of rows, such as {rows.name}, and others, such as "
            f"{texts[0].name}, each of which would be a document: name the files to read, or "
            f"choose them with --pattern='*{kind(rows)}{compression(rows)}', or all with "
            "--pattern='*'"
        )
    return found


def _fail_to_list(error: OSError) -> None:
    raise OSError(f"{error.filename} cannot be listed: {error.strerror}") from error


def _check_is_read(file: Path) -> None:
    """Raises an error with a remedy for a path that is not a file, or neither rows nor text."""
    if not file.exists():
        link = "it is a link to nothing" if file.is_symlink() else "check its name"
        raise FileNotFoundError(f"there is no file {file}: {link}")
    if not file.is_file():
        raise OSError(f"{file} is not a regular file: leave it out")
    found = kind(file)
    if found not in READERS and found in _ADVICE:
        raise ValueError(f"{file}: files that end in {found} are not read: {_ADVICE[found]}")
    if compression(file) and found in _NOT_COMPRESSED:
        raise ValueError(f"{file} is {found} inside of {file.suffix}, which is not read: unpack it")


def _is_text(file: Path) -> bool:
    return kind(file) not in READERS


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)
