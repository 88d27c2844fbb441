"""Blocks of rows from CSV and TSV files, whose first row names the columns."""

import codecs
import csv
from collections.abc import Iterator
from pathlib import Path

from data_tools.rows.block import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    TOO_LONG,
    Block,
    Field,
    Row,
    check_columns,
    utf8_row,
)
from data_tools.rows.compressed import Stream, kind, opened

DELIMITERS = {".csv": ",", ".tsv": "\t"}  # suffixes, in any case

# A row: the number of its first line, and its values, or the end of a sentence about it. The values
# are bytes read as Latin-1: csv parses only strings, and no byte of UTF-8's longer characters is
# one of its special characters.
Parsed = tuple[int, list[str] | str]


def delimited_blocks(
    path: Path, size: int, start: int, stop: int, position: list[int] | None, field: Field
) -> Iterator[Block]:
    """Yields the rows of the file if `start` is 0; `position` is [byte, line] of a row.

    A quoted value may hold line ends, so nobody can tell from the middle of a file where rows
    begin. Raises ValueError for missing or ambiguous columns, and for a file without a first row.
    """
    if start > 0:
        return
    csv.field_size_limit(MAX_ROW_BYTES)  # its own limit, 128 KiB, is for the whole process
    with opened(path) as stream:
        lines = _Lines(path, stream)
        _, names = next(_rows(path, lines), (1, "has no first row that names the columns"))
        if isinstance(names, str):
            raise ValueError(f"{path}, line 1, {names}")
        columns = [str(utf8_row(name.encode("latin-1"), f"{path}, line 1,").text) for name in names]
        check_columns(path, columns, field.needed)
        begin = (lines.offset, lines.number)
    with opened(path) as stream:
        lines = _Lines(path, stream, *(position or begin))
        rows: list[Parsed] = []
        begin, read_bytes = (lines.offset, lines.number), 0
        for row in _rows(path, lines):
            rows.append(row)
            read_bytes = lines.offset - begin[0]
            if read_bytes >= BLOCK_BYTES:
                content = (str(path), columns, rows)
                yield Block([*begin], stream.fraction, read_bytes, content, _texts)
                rows, begin, read_bytes = [], (lines.offset, lines.number), 0
        if rows:
            yield Block([*begin], 1.0, read_bytes, (str(path), columns, rows), _texts)


def _texts(content: tuple[str, list[str], list[Parsed]], field: Field) -> Iterator[Row]:
    path, columns, rows = content
    for number, values in rows:
        where = f"{path}, line {number},"
        if isinstance(values, str):
            yield Row(where, None, values)
        elif len(values) != len(columns):
            problem = f"has {len(values)} values, but the first row names {len(columns)} columns"
            yield Row(where, None, problem)
        elif field.needed is not None:
            yield utf8_row(values[columns.index(field.needed)].encode("latin-1"), where)
        else:
            decoded = [utf8_row(value.encode("latin-1"), where) for value in values]
            bad = next((row for row in decoded if row.text is None), None)
            texts = (row.text for row in decoded)
            yield bad or field.row(dict(zip(columns, texts, strict=True)), where)


def _rows(path: Path, lines: "_Lines") -> Iterator[Parsed]:
    """Yields the rows; after an error, from the next line on. Raises OSError for a long value."""
    reader = csv.reader(lines, delimiter=DELIMITERS[kind(path)], strict=True)
    while True:
        number = lines.number + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "larger than field limit" in str(error):  # the next line may be inside of the value
                raise OSError(f"{path}, line {number}, {TOO_LONG}") from error
            yield number, f"is not a row of values: {error}"
            continue
        if values:
            yield number, values


class _Lines:
    """The lines of a stream from byte `offset` on, as Latin-1 characters with their line ends.

    `offset` and `number` are the bytes and lines before the next one.
    """

    def __init__(self, path: Path, stream: Stream, offset: int = 0, number: int = 0) -> None:
        self.offset, self.number = stream.seek(offset), number
        self._lines = self._read(path, stream)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        is_first = self.offset == 0
        self.offset, self.number = self.offset + len(line), self.number + 1
        return (line.removeprefix(codecs.BOM_UTF8) if is_first else line).decode("latin-1")

    def _read(self, path: Path, stream: Stream) -> Iterator[bytes]:
        kept = b""
        while content := stream.read(BLOCK_BYTES):
            *lines, kept = (kept + content).split(b"\n")
            for line in lines:
                yield line + b"\n"
            if len(kept) > MAX_ROW_BYTES:
                raise OSError(f"{path}, line {self.number + 1}, {TOO_LONG}")
        if kept:
            yield kept
