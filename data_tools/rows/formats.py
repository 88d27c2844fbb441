"""How the rows of a file are read, by its suffix. A file with another suffix is a text."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_tools.rows.arrow import ARROW, PARQUET, arrow_blocks
from data_tools.rows.block import Block, Field
from data_tools.rows.compressed import compression
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
    **dict.fromkeys((".jsonl", ".ndjson", ".json", ".jsonlines", ".jl"), _json_lines),
    **dict.fromkeys((*PARQUET, *ARROW), arrow_blocks),
}

# Suffixes of files that are neither read as rows nor texts, and what to do with them.
_REFUSED = {
    "write its rows as JSON Lines or Parquet": (
        *(".csv", ".tsv", ".psv", ".xls", ".xlsx", ".ods", ".avro", ".orc", ".tfrecord", ".warc"),
        *(".wet", ".wat", ".db", ".sqlite", ".sqlite3", ".h5", ".hdf5", ".npy", ".npz", ".pkl"),
        *(".pickle", ".pt", ".safetensors"),
    ),
    "unpack it, or compress it as .gz or .zst instead": (
        *(".bz2", ".xz", ".lzma", ".lz4", ".br", ".z", ".zip", ".7z", ".rar", ".tar", ".tgz"),
        *(".tbz2", ".txz"),
    ),
    "write its text as a text file": (".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub"),
    "its name is that of an unfinished file: finish it, or leave it out": (
        *(".tmp", ".temp", ".part", ".partial", ".crdownload", ".incomplete"),
    ),
}
_ADVICE = {suffix: advice for advice, suffixes in _REFUSED.items() for suffix in suffixes}


def kind(file: Path) -> str:
    """The suffix that tells how to read the file, in lower case: that before .gz or .zst, if it has
    one."""
    return (file.with_suffix("") if compression(file) else file).suffix.lower()


def check_is_read(file: Path) -> None:
    """Raises ValueError for a file that is neither rows nor text, saying what to do."""
    found = kind(file)
    if found in READERS:
        if compression(file) and found in (*PARQUET, *ARROW):
            raise ValueError(
                f"{file} is {found} inside of {file.suffix}, which is not read: unpack it"
            )
    elif found in _ADVICE:
        raise ValueError(f"{file}: files that end in {found} are not read: {_ADVICE[found]}")


def may_be_file(name: str) -> bool:
    """Whether the name ends as that of a file does."""
    suffix = kind(Path(name))
    return (
        bool(compression(Path(name)))
        or suffix in READERS
        or suffix in _ADVICE
        or suffix in (".txt", ".py", ".md")
    )
