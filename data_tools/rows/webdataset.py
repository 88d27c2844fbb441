"""Blocks of samples from WebDataset's tar files.

A sample is a run of files with the same name up to the first dot; the rest of the name, in lower
case, is the column: `0001.txt` and `0001.json` are columns `txt` and `json` of sample `0001`.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_tools.rows.block import (
    BLOCK_BYTES,
    MAX_ROW_BYTES,
    TOO_LONG,
    Block,
    Field,
    Row,
    missing_column,
    utf8_row,
)
from data_tools.rows.compressed import opened

WEBDATASET = (".tar",)  # suffix, in any case
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_TEXTS = ("txt", "text")  # columns that a text function gets as strings, like .json as objects

# The name of a sample, and its columns: bytes, or None for one that is not needed or too long.
Sample = tuple[str, dict[str, bytes | None]]


def webdataset_blocks(
    path: Path, size: int, start: int, stop: int, position: int | None, field: Field
) -> Iterator[Block]:
    """Yields the samples of the file if `start` is 0; `position` is the byte of one in the tar.

    Raises OSError, naming the file, if it is truncated or damaged.
    """
    if start > 0:
        return
    with opened(path) as stream:
        begin = stream.seek(position or 0)
        samples: list[Sample] = []
        read_bytes = 0
        for place, sample in _samples(path, stream, begin, field):
            if read_bytes >= BLOCK_BYTES:
                yield Block(begin, stream.fraction, read_bytes, (str(path), samples), _rows)
                samples, read_bytes = [], 0
            begin = begin if samples else place
            samples.append(sample)
            read_bytes += sum(len(value or b"") for value in sample[1].values())
        if samples:
            yield Block(begin, 1.0, read_bytes, (str(path), samples), _rows)


def _samples(path: Path, stream: Any, begin: int, field: Field) -> Iterator[tuple[int, Sample]]:
    """Yields the place of each sample in the tar, and the sample."""
    place, key, columns = begin, "", dict[str, bytes | None]()
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it keeps all otherwise
                name = _NAME.fullmatch(member.name)
                if name is None or not member.isreg():
                    continue
                if name[1] != key:
                    if columns:
                        yield place, (key, columns)
                    place, key, columns = begin + member.offset, name[1], {}
                column = name[2].lower()
                if column in columns:
                    raise tarfile.ReadError(f"sample {key!r} has two files .{column}")
                columns[column] = None
                if field.needed in (None, column) and member.size <= MAX_ROW_BYTES:
                    content = archive.extractfile(member)
                    assert content is not None, "a regular file"
                    columns[column] = content.read()
            # An archive ends with two blocks of zeros; the first was read.
            if not archive.fileobj.read(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("unexpected end of data")
    except (tarfile.TarError, EOFError) as error:
        raise OSError(
            f"{path} cannot be read to its end ({error}): fetch or make it again"
        ) from error
    if columns:
        yield place, (key, columns)


def _rows(content: tuple[str, list[Sample]], field: Field) -> Iterator[Row]:
    path, samples = content
    for key, columns in samples:
        where = f"{path}, sample {key!r},"
        needed = [*columns] if field.needed is None else [field.needed]
        if field.needed is not None and field.needed not in columns:
            yield Row(where, None, missing_column(field.needed, columns))
        elif any(columns[name] is None for name in needed):
            yield Row(where, None, TOO_LONG)
        elif field.needed is not None:
            yield utf8_row(columns[field.needed] or b"", where)
        else:
            try:
                decoded = {name: _decoded(name, value or b"") for name, value in columns.items()}
                yield field.row({"__key__": key, **decoded}, where)
            except ValueError as error:
                yield Row(where, None, f"cannot be decoded: {error}")


def _decoded(column: str, value: bytes) -> Any:
    """Returns a JSON value, a string, or the bytes; raises ValueError."""
    last = column.rpartition(".")[2]
    if last == "json":
        return json.loads(value)
    return value.decode() if last in _TEXTS else value
