"""Blocks of samples from MDS shards, the format of MosaicML's `streaming`.

A shard begins with the number of samples and the bytes at which each begins and the last ends. JSON
that describes the columns follows, and then the samples. Each has the sizes of the columns without
a fixed size, and its columns. All these numbers are little-endian uint32.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
from data_tools.rows.compressed import Stream, opened

MOSAIC = (".mds",)  # suffix, in any case
INDEX = "index.json"  # in the folder of the shards, which is read without it
_LARGEST_DESCRIPTION = 1024 * 1024  # bytes
_NUMBERS = ("int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class _Columns(NamedTuple):
    names: list[str]
    encodings: list[str]
    sizes: list[int | None]  # bytes; None if they vary


def mosaic_blocks(
    path: Path, size: int, start: int, stop: int, position: int | None, field: Field
) -> Iterator[Block]:
    """Yields the samples of the shard if `start` is 0; `position` is the number of one.

    Raises OSError, naming the file, if it is truncated or damaged, ValueError for a missing column.
    """
    if start > 0:
        return
    with opened(path) as stream:
        begins, columns = _header(path, stream)
        check_columns(path, columns.names, field.needed)
        first, samples, read_bytes = position or 0, list[bytes | None](), 0
        _read(path, stream, int(begins[first] - begins[0]))
        for number in range(first, len(begins) - 1):
            length = int(begins[number + 1] - begins[number])
            kept = length <= MAX_ROW_BYTES
            sample = _read(path, stream, length, kept)
            samples.append(sample if kept else None)
            read_bytes += len(sample)
            if read_bytes >= BLOCK_BYTES or number == len(begins) - 2:
                content = (str(path), first, columns, samples)
                yield Block(first, (number + 1) / (len(begins) - 1), read_bytes, content, _rows)
                first, samples, read_bytes = number + 1, [], 0


def _header(path: Path, stream: Stream) -> tuple[np.ndarray, _Columns]:
    """Returns the bytes at which the samples begin and the last ends (int64), and the columns."""
    (count,) = np.frombuffer(_read(path, stream, 4), "<u4")
    begins = np.frombuffer(_read(path, stream, 4 * (int(count) + 1)), "<u4").astype(np.int64)
    length = int(begins[0]) - 4 * (int(count) + 2)
    try:
        if not 0 < length <= _LARGEST_DESCRIPTION or (np.diff(begins) < 0).any():
            raise ValueError("its samples are not in order")
        found = json.loads(_read(path, stream, length))
        columns = _Columns(*(found[f"column_{each}"] for each in _Columns._fields))
        if found["format"] != "mds" or len({len(each) for each in columns}) != 1:
            raise ValueError(f"it is described as {found!r:.80}")
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(
            f"{path} is not an MDS shard, or damaged ({error!r}): make it again"
        ) from error
    return begins, columns


def _read(path: Path, stream: Stream, length: int, kept: bool = True) -> bytes:
    """Reads `length` bytes; returns them if they are `kept`. Raises OSError if there are fewer."""
    pieces, left = [], length
    while left:
        piece = stream.read(min(left, BLOCK_BYTES))
        if not piece:
            raise OSError(f"{path} is truncated: fetch or make it again")
        left -= len(piece)
        if kept:
            pieces.append(piece)
    return b"".join(pieces)


def _rows(content: tuple[str, int, _Columns, list[bytes | None]], field: Field) -> Iterator[Row]:
    path, first, columns, samples = content
    for number, sample in enumerate(samples, start=first):
        where = f"{path}, sample {number},"
        if sample is None:
            yield Row(where, None, TOO_LONG)
            continue
        try:
            values = dict(zip(columns.names, _values(sample, columns), strict=True))
            encodings = dict(zip(columns.names, columns.encodings, strict=True))
            if field.needed is not None and encodings[field.needed] == "str":
                yield utf8_row(values[field.needed], where)
            else:
                row = {name: _decoded(encodings[name], value) for name, value in values.items()}
                yield field.row(row, where)
        except ValueError as error:
            yield Row(where, None, f"cannot be decoded: {error}")


def _values(sample: bytes, columns: _Columns) -> list[bytes]:
    """Returns the bytes of each column; raises ValueError if they don't fill the sample."""
    varying = columns.sizes.count(None)
    ends = 4 * varying
    given = iter(np.frombuffer(sample[:ends], "<u4").tolist())
    sizes = [next(given) if size is None else size for size in columns.sizes]
    if ends + sum(sizes) != len(sample):
        raise ValueError(f"its columns have {ends + sum(sizes)} bytes, and it has {len(sample)}")
    values = []
    for size in sizes:
        values.append(sample[ends : ends + size])
        ends += size
    return values


def _decoded(encoding: str, value: bytes) -> Any:
    """Returns a string, a number, a JSON value, or the bytes; raises ValueError."""
    if encoding == "json":
        return json.loads(value)
    if encoding in _NUMBERS:
        return int(np.frombuffer(value, "int64" if encoding == "int" else encoding)[0])
    return value.decode() if encoding.startswith("str") else value
