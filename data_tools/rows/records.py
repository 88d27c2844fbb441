"""Files of records with a separator: JSON Lines, and texts of several documents."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path

from data_tools.rows.block import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    TOO_LONG,
    Block,
    Field,
    Row,
    utf8_row,
)
from data_tools.rows.compressed import Stream, compression, opened

# Complete records of a file: its path, the offset of the first in the decompressed file, all bytes
# (None for one record that is too long), and the separator.
Records = tuple[str, int, bytes | None, bytes]


def text_row(text: bytes | None, where: str, path: str, field: Field) -> Row:
    """Returns the row of a text, with the columns `text` and `path`; None if it is too long."""
    row = Row(where, None, TOO_LONG) if text is None else utf8_row(text, where)
    if row.text is None or field.needed is not None:
        return row
    return field.row({"text": row.text, "path": path}, where)


def _documents(content: Records, field: Field) -> Iterator[Row]:
    for where, text in _split(content):
        yield text_row(text and text.strip(b"\r\n"), where, content[0], field)


def _lines(content: Records, field: Field) -> Iterator[Row]:
    for where, line in _split(content, mark=codecs.BOM_UTF8):
        try:
            if line is None:
                yield Row(where, None, TOO_LONG)
            else:
                yield field.row(json.loads(str(line, "utf-8")), where)
        except UnicodeDecodeError as error:
            yield Row(where, None, f"is not UTF-8 text (byte {error.start} of the line)")
        except (ValueError, RecursionError) as error:
            yield Row(where, None, f"is not JSON: {error}")


def _split(content: Records, mark: bytes = b"") -> Iterator[tuple[str, bytes | None]]:
    """Yields the place and content of each non-blank record, without a byte order mark."""
    path, begin, records, separator = content
    if records is None:
        yield f"{path}, byte {begin}", None
        return
    for record in records.split(separator):
        where = f"{path}, byte {begin}"
        text = record.removeprefix(mark) if begin == 0 else record
        begin += len(record) + len(separator)
        if text and not text.isspace():
            yield where, None if len(record) > MAX_ROW_BYTES else text


def lines_blocks(
    path: Path, size: int, start: int, stop: int, position: int | None, field: Field
) -> Iterator[Block]:
    """Yields the lines that begin at bytes [start, stop) of the file, from byte `position` on.

    The range with byte 0 has all lines of a compressed file; `position` is then decompressed.
    """
    whole = bool(compression(path))
    if whole and start > 0:
        return
    with opened(path) as stream:
        begin = start if position is None else position
        begin = stream.seek(begin) if position or not begin else _next_line(stream, begin)
        for offset, content in _records(stream, begin, None if whole else stop, b"\n"):
            lines, size = (str(path), offset, content, b"\n"), len(content or b"")
            yield Block(offset, stream.fraction, size, lines, _lines, lines_of=str(path))


def documents_blocks(path: Path, separator: bytes, position: int | None) -> Iterator[Block]:
    """Yields the documents of a text file from byte `position` of the decompressed content on.

    Surrounding newlines are stripped, and blank documents skipped.
    """
    with opened(path) as stream:
        for offset, content in _records(stream, stream.seek(position or 0), None, separator):
            texts = (str(path), offset, content, separator)
            yield Block(offset, stream.fraction, len(content or b""), texts, _documents)


def _records(
    stream: Stream, begin: int, stop: int | None, separator: bytes
) -> Iterator[tuple[int, bytes | None]]:
    """Yields the offset and content of complete records, many at a time, that begin before `stop`.

    `begin` is the stream's offset. The last record may lack its separator. A record that is much
    too long is yielded separately, as None. A `stop` needs a separator of one byte.
    """
    if stop is not None and begin >= stop:
        return
    kept, dropped = bytearray(), 0  # the bytes from `begin` on; the first are dropped if too many
    while content := stream.read(BLOCK_BYTES):
        searched = max(0, len(kept) - len(separator) + 1)
        kept += content
        first = kept.find(separator, searched)
        if first < 0:
            if dropped or len(kept) > MAX_ROW_BYTES + len(separator):
                rest = len(kept) - len(separator) + 1  # a separator may begin in the others
                dropped += rest
                del kept[:rest]
            continue
        if dropped:
            yield begin, None
            begin += dropped + first + len(separator)
            del kept[: first + len(separator)]
            dropped = 0
            if stop is not None and begin >= stop:
                return
        # The last record in range is the one that holds byte stop - 1.
        end = 0 if stop is None else kept.find(separator, max(stop - 1 - begin, 0)) + 1
        is_last = end > 0
        end = end or len(kept) - len(kept.split(separator)[-1])
        if end:
            yield begin, bytes(kept[:end])
        if is_last:
            return
        begin += end
        del kept[:end]
    if kept or dropped:
        yield begin, None if dropped else bytes(kept)


def _next_line(stream: Stream, start: int) -> int:
    """Moves the stream to the first line that begins at `start` or later; returns its offset."""
    begin = stream.seek(start - 1)
    while content := stream.read(BLOCK_BYTES):
        end = content.find(b"\n")
        if end >= 0:
            return stream.seek(begin + end + 1)
        begin += len(content)
    return begin
