"""Rows, blocks of rows and sources of blocks: the interface of readers of file formats."""

import functools
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from data_tools.rows.compressed import opened

BLOCK_BYTES = 1024 * 1024  # approximate bytes of text; a longer row makes a longer block
MAX_ROW_BYTES = 128 * 1024 * 1024  # of a line or a text file; bounds a row's memory
TOO_LONG = f"is longer than {MAX_ROW_BYTES // 2**20} MiB: cut it into several rows"
_SHOWN = 10  # maximum number of messages about skipped rows


class Row(NamedTuple):
    """A row of the source, with its text or an error."""

    where: str  # the file and the line or row in it
    text: str | None
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.where} {self.problem}"


class Field(ABC):
    """Extracts the text of a row."""

    @property
    def needed(self) -> str | None:
        """The only column that it reads; None for all."""
        return None

    @property
    @abstractmethod
    def description(self) -> Any:
        """The field as JSON values, for the record."""

    @abstractmethod
    def text(self, row: Mapping[str, Any], filled_up: bool) -> str:
        """Returns the text of a row; raises ValueError with the end of a sentence about the row.

        `filled_up` is True if a null may stand for a missing entry, as in Arrow's structs.
        """

    def row(self, row: object, where: str, filled_up: bool = False) -> Row:
        """Returns the row with its text, or its error."""
        if not isinstance(row, Mapping):
            return Row(where, None, f"is not a JSON object but {type(row).__name__}")
        try:
            return Row(where, self.text(row, filled_up))
        except ValueError as error:
            return Row(where, None, str(error))


@dataclass(frozen=True)
class TextField(Field):
    """A column, or the result of a Python function of the whole row."""

    column: str = "text"
    function: str | None = None  # "package.module:function", called with the row's dict

    @property
    def needed(self) -> str | None:
        return self.column if self.function is None else None

    @property
    def description(self) -> str:
        return self.function or self.column

    def text(self, row: Mapping[str, Any], filled_up: bool) -> str:
        source = self.function or f"column {self.column!r}"
        if self.function is None:
            if self.column not in row:
                raise ValueError(missing_column(self.column, row))
            found = row[self.column]
        else:
            try:
                found = imported(self.function)(row)
            except Exception as error:  # any error of the user's function makes this row bad
                raise ValueError(f"makes {self.function} raise {error!r}") from error
        if not isinstance(found, str):
            raise ValueError(f"has no string in {source} but {found!r:.40}")
        return found


def check_columns(path: Path, names: Sequence[str], needed: str | None) -> None:
    """Raises ValueError unless a file has the column `needed` once, or for None each one once."""
    for name in names if needed is None else [needed]:
        if name not in names:
            raise ValueError(f"{path} {missing_column(name, names)}")
        if names.count(name) > 1:
            raise ValueError(
                f"{path} has {names.count(name)} columns {name!r}: give them different names"
            )


def missing_column(column: str | None, names: Collection[str]) -> str:
    """Returns the end of a sentence about rows without the column."""
    known = ", ".join(map(repr, names))
    return f"has no column {column!r}; it has {known}: choose one with --text_column"


@functools.cache
def imported(function: str) -> Callable[[Mapping[str, Any]], Any]:
    """Imports the text function; raises ValueError if that fails."""
    module, _, name = function.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"cannot import the text function {function!r}, which should be given as "
            f"package.module:function: {error}"
        ) from error
    if not callable(loaded):
        raise ValueError(f"the text function {function!r} is {loaded!r}, not a function")
    return loaded


class Block(NamedTuple):
    """Consecutive rows of a source, as read; other processes extract their texts."""

    position: Any  # of the block's beginning, as JSON values
    fraction: float | None  # of the source, up to the block's end; None if unknown
    size: int  # approximate bytes of memory of the rows
    content: Any  # the rows as read
    rows_of: Callable[[Any, Field], Iterator[Row]]  # makes rows of the content; can be pickled
    lines_of: str | None = None  # the file of lines to whose bytes the rows' places refer, if any

    def rows(self, field: Field) -> Iterator[Row]:
        """Yields the rows, with their texts."""
        return self.rows_of(self.content, field)

    def locate(self, row: Row) -> Row:
        """Returns the row with its line number, for which the file is read up to it."""
        if self.lines_of is None:
            return row
        place, number = int(row.where.rpartition(" ")[2]), 1
        with opened(Path(self.lines_of)) as stream:
            while place > 0 and (content := stream.read(min(place, BLOCK_BYTES))):
                number += content.count(b"\n")
                place -= len(content)
        return row._replace(where=f"{self.lines_of}, line {number},")


@runtime_checkable
class RowSource(Protocol):
    """Rows in a fixed order, which can be divided into shards and resumed in the middle."""

    field: Field

    @property
    def description(self) -> dict[str, Any]:
        """The rows and their origin, as JSON values, for the record."""

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """Yields the blocks of one shard, from the one that began at `position`.

        The concatenated shards contain each row once; `shards` may be any number.
        """


def bad_row(block: Block, row: Row) -> ValueError:
    """Returns an error that names a row and its problem."""
    return ValueError(f"{block.locate(row)}: repair it, or skip such rows with --on_bad_row=skip")


class SkippedRows:
    """Prints the first skipped rows to stderr."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, block: Block | None, row: Row) -> None:
        """Reports a skipped row; `block` may be used to locate it."""
        self._count += 1
        if self._count <= _SHOWN:
            print(f"skipped: {block.locate(row) if block else row}", file=sys.stderr, flush=True)
        if self._count == _SHOWN:
            print("further skipped rows are not shown", file=sys.stderr, flush=True)


def utf8_row(content: bytes, where: str) -> Row:
    """Returns a row with the text `content`."""
    try:
        return Row(where, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(where, None, f"is not UTF-8 text (byte {error.start})")
