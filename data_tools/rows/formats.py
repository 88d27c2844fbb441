"""How the rows of a file are read, by its suffix. A file with another suffix is a text."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_tools.rows.arrow import arrow_blocks
from data_tools.rows.block import Block, Field
from data_tools.rows.json_lines import json_lines_blocks


def _json_lines(
    path: Path, size: int, start: int, stop: int, position: Any, _: Field
) -> Iterator[Block]:
    return json_lines_blocks(path, start, min(stop, size), position)


# From the file, its size, bytes `start` and `stop` (up to size + 1), the position of a block or
# `None`, and what of a row is its text: the blocks of what begins between `start` and `stop`, from
# the one at that position on. What cannot be cut begins at byte 0.
Reader = Callable[[Path, int, int, int, Any, Field], Iterator[Block]]
READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
    ".parquet": arrow_blocks,
    ".arrow": arrow_blocks,
}
