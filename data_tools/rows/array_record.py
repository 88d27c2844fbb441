"""Blocks of records from ArrayRecord files, the format of Grain and TFDS.

A record is a JSON object, a serialized `tf.train.Example`, or a text, which has the column `text`.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_tools.rows.block import BLOCK_BYTES, MAX_ROW_BYTES, TOO_LONG, Block, Field, Row, utf8_row

ARRAY_RECORD = (".array_record", ".arrayrecord")  # suffixes, in any case
_READ_RECORDS = 16  # at once: they may be large

# TensorFlow's example.proto and feature.proto; on the wire a map is a repeated entry.
_EXAMPLE = """
name: "example.proto" package: "tensorflow" syntax: "proto3"
message_type {
  name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES }
}
message_type {
  name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT }
}
message_type {
  name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
}
message_type {
  name: "Feature"
  field { name: "bytes" number: 1 label: LABEL_OPTIONAL type_name: "BytesList" }
  field { name: "floats" number: 2 label: LABEL_OPTIONAL type_name: "FloatList" }
  field { name: "integers" number: 3 label: LABEL_OPTIONAL type_name: "Int64List" }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "value" number: 2 label: LABEL_OPTIONAL type_name: "Feature" }
}
message_type {
  name: "Features"
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "Entry" }
}
message_type {
  name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type_name: "Features" }
}
"""


def array_record_blocks(
    path: Path, size: int, start: int, stop: int, position: int | None, field: Field
) -> Iterator[Block]:
    """Yields the records that begin in bytes [start, stop) of `size`, if all have equal sizes.

    `position` is the number of a record. Raises OSError, naming the file, if it is truncated or
    damaged, ValueError without the package `array_record`.
    """
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise ValueError(f"{path} needs a package: pip install 'lmlib[array-record]'") from error
    try:
        reader = ArrayRecordReader(str(path))
        if not reader.ok():
            reader.close()  # raises the cause
        count = reader.num_records()
        low, high = (-(-count * byte // (size + 1)) for byte in (start, stop))
        records, read_bytes = list[bytes](), 0
        first = number = low if position is None else position
        while number < high:
            found = reader.read(number, min(number + _READ_RECORDS, high))
            records += found
            number, read_bytes = number + len(found), read_bytes + sum(map(len, found))
            if read_bytes >= BLOCK_BYTES or number == high:
                yield Block(first, number / count, read_bytes, (str(path), first, records), _rows)
                first, records, read_bytes = number, [], 0
    except (RuntimeError, IndexError) as error:
        raise OSError(f"{path} cannot be read ({error}): fetch or make it again") from error


def _rows(content: tuple[str, int, list[bytes]], field: Field) -> Iterator[Row]:
    path, first, records = content
    for number, record in enumerate(records, start=first):
        where = f"{path}, record {number},"
        if len(record) > MAX_ROW_BYTES:
            yield Row(where, None, TOO_LONG)
        elif (columns := _columns(record)) is not None:
            yield field.row(columns, where)
        else:
            row = utf8_row(record, where)
            yield row if row.text is None else field.row({"text": row.text}, where)


def _columns(record: bytes) -> dict[str, Any] | None:
    """Returns the values of a JSON object or an example; None for a text."""
    if record.startswith(b"{"):
        try:
            return dict(json.loads(record))
        except (ValueError, RecursionError):
            return None
    entries = _entries(record) if record.startswith(b"\n") else []
    return {entry.key: _value(entry.value) for entry in entries} or None


def _entries(record: bytes) -> Any:
    """Returns the entries of a serialized example; nothing for other bytes."""
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    try:
        example = _example().FromString(record)
    except DecodeError:
        return []
    return [] if len(UnknownFieldSet(example)) else example.features.feature


@functools.cache
def _example() -> Any:
    """Returns the class of `tf.train.Example`, without TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def _value(feature: Any) -> Any:
    """Returns the list's values, or the only one; bytes as a string if they are UTF-8."""
    if not feature.ListFields():
        return []
    ((_, found),) = feature.ListFields()
    values = [_text(value) if isinstance(value, bytes) else value for value in found.value]
    return values[0] if len(values) == 1 else values


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
