"""The records in a file of W&B's, which `wandb sync` reads."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(file: Path) -> Iterator[Any]:
    """Of blocks of 32 KiB, in them pieces with a header of seven bytes (checksum, length, kind:
    whole, first, middle, last), as in LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    data, at, piece = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(piece)
            yield record
            piece = b""
