"""JSON Lines: a JSON object in each line."""

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from data_tools.rows.block import BLOCK_BYTES, MAX_ROW_BYTES, TOO_LONG, Block, Field, Row
from data_tools.rows.compressed import compression, decompressed, skip

_FIRST_BYTES = 64 * 1024  # of a file, which tell whether it has lines


@dataclass(frozen=True)
class JsonLinesBlock(Block):
    """Whole lines of a file. Blank lines are no rows."""

    path: str
    offset: int  # of the first line, in the decompressed file
    lines: bytes | None  # None for one line that is too long

    @property
    def size(self) -> int:
        """See `Block.size`."""
        return 0 if self.lines is None else len(self.lines)

    def rows(self, field: Field) -> Iterator[Row]:
        """See `Block.rows`; a row is located by its byte, see `locate`."""
        if self.lines is None:
            yield Row(f"{self.path}, byte {self.offset}", None, TOO_LONG)
            return
        text = field.load()
        content = memoryview(self.lines)  # a line may be too large to be copied lightly
        starts_with_mark = self.offset == 0 and self.lines.startswith(codecs.BOM_UTF8)
        begin = len(codecs.BOM_UTF8) if starts_with_mark else 0
        while begin < len(self.lines):
            end = self.lines.find(b"\n", begin)
            end = len(self.lines) if end < 0 else end
            line = content[begin:end]
            where = f"{self.path}, byte {self.offset + begin}"
            begin = end + 1
            if not bytes(line[:64]).strip() and not bytes(line).strip():
                continue
            try:
                row = json.loads(str(line, "utf-8"))
            except UnicodeDecodeError as error:
                yield Row(where, None, f"is not UTF-8 text (byte {error.start} of the line)")
            except (ValueError, RecursionError) as error:
                yield Row(where, None, f"is not JSON: {error}")
            else:
                yield field.row(row, text, where)

    def locate(self, row: Row) -> Row:
        """The row with its line number, for which the file is read up to there."""
        place = int(row.where.rpartition(" ")[2])
        number = 1
        with open(self.path, "rb", buffering=0) as stored:
            stream = decompressed(stored, Path(self.path))
            while place > 0 and (content := stream.read(min(place, BLOCK_BYTES))):
                number += content.count(b"\n")
                place -= len(content)
        return row._replace(where=f"{self.path}, line {number},")


def json_lines_blocks(
    path: Path, start: int, stop: int, position: int | None
) -> Iterator[JsonLinesBlock]:
    """The lines that begin at bytes [start, stop) of the file, from byte `position` on.

    A compressed file has all its lines in the range that holds byte 0; `position` counts
    decompressed bytes there. `Block.fraction` is that of the file.
    Raises ValueError for a file that is one JSON value.
    """
    compressed = bool(compression(path))
    if compressed and start > 0:
        return
    _check_has_lines(path)
    with open(path, "rb", buffering=0) as stored:
        size = os.fstat(stored.fileno()).st_size
        stream = decompressed(stored, path)
        begin = _skip_to(stream, start if position is None else position, compressed, position)
        for offset, lines in _line_blocks(stream, begin, None if compressed else stop):
            yield JsonLinesBlock(offset, stored.tell() / size, str(path), offset, lines)


def _check_has_lines(path: Path) -> None:
    """Raises ValueError if the file is one array of objects, or one object over several lines."""
    with open(path, "rb", buffering=0) as stored:
        begin = decompressed(stored, path).read(_FIRST_BYTES)
    begin = begin.removeprefix(codecs.BOM_UTF8).lstrip()
    line, _, rest = (part.strip() for part in begin.partition(b"\n"))
    if line == b"{":
        found, elements = "object", "."
    elif begin[:1] == b"[" and begin[1:].lstrip()[:1] == b"{" and not (_is_json(line) and rest):
        found, elements = "array", ".[]"
    else:
        return
    raise ValueError(
        f"{path} holds one JSON {found}, not an object in each line: write each on a line of its "
        f"own, as `jq -c '{elements}' {path.name}` does"
    )


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _skip_to(stream: BinaryIO, start: int, compressed: bool, position: int | None) -> int:
    """Puts the stream at the first line that begins at `start` or later, and says where it is."""
    if start == 0:
        return 0
    if compressed:
        skip(stream, start)
        return start
    if position is not None:
        return stream.seek(start)
    stream.seek(start - 1)
    begin = start - 1
    while content := stream.read(BLOCK_BYTES):
        end = content.find(b"\n")
        if end >= 0:
            return stream.seek(begin + end + 1)
        begin += len(content)
    return begin


def _line_blocks(
    stream: BinaryIO, begin: int, stop: int | None
) -> Iterator[tuple[int, bytes | None]]:
    """(offset, whole lines) of those that begin before `stop`; the last may lack its newline.

    A line that is too long comes alone, as None.
    """
    kept: list[bytes] = []  # lines of which the end was not read yet
    kept_bytes = 0
    while stop is None or begin < stop:
        content = stream.read(BLOCK_BYTES)
        first = content.find(b"\n") + 1 or len(content)
        if kept_bytes + first > MAX_ROW_BYTES:
            kept = []
            while content and not content.endswith(b"\n", 0, first):
                kept_bytes += len(content)
                content = stream.read(BLOCK_BYTES)
                first = content.find(b"\n") + 1 or len(content)
            yield begin, None
            begin += kept_bytes + first
            content, kept_bytes = content[first:], 0
            if stop is not None and begin >= stop:
                return
            content = content or stream.read(BLOCK_BYTES)
        if not content:
            if kept:
                yield begin, b"".join(kept)
            return
        # The last line that belongs here is the one that holds byte stop - 1.
        last_byte = None if stop is None else stop - 1 - begin - kept_bytes
        end = 0
        if last_byte is not None and last_byte < len(content):
            end = content.find(b"\n", max(last_byte, 0)) + 1
        done = end > 0
        end = end or content.rfind(b"\n") + 1
        if end == 0:
            kept.append(content)
            kept_bytes += len(content)
            continue
        lines = b"".join([*kept, content[:end]])
        yield begin, lines
        if done:
            return
        begin += len(lines)
        kept = [content[end:]] if end < len(content) else []
        kept_bytes = len(content) - end
