"""Rows, blocks of rows and sources of blocks: everything that a reader of a file format needs."""

import functools
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from data_tools.rows.compressed import opened

BLOCK_BYTES = 1024 * 1024  # of text, about; a longer row makes a longer block
MAX_ROW_BYTES = 128 * 1024 * 1024  # of a line or a text file; bounds the memory that a row takes
TOO_LONG = f"is longer than {MAX_ROW_BYTES // 2**20} MiB: cut it into several rows"
_SHOWN = 10  # lines about rows that are left out


class Row(NamedTuple):
    """A row of the source, with its text or its problem."""

    where: str  # the file and the line or row in it
    text: str | None
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.where} {self.problem}"


class Field(ABC):
    """The part of a row that is its text."""

    @property
    @abstractmethod
    def needed(self) -> str | None:
        """The only column that is needed; None: all of them."""

    @property
    @abstractmethod
    def description(self) -> Any:
        """The field in JSON values, for the record."""

    @abstractmethod
    def text(self, row: Mapping[str, Any], filled_up: bool) -> str:
        """The text of a row; raises ValueError, whose message completes a sentence about the row.

        `filled_up`: a null may stand for an entry that the row lacks, as in Arrow's structs.
        """

    def row(self, row: object, where: str, filled_up: bool = False) -> Row:
        """The row with its text, or its problem."""
        if not isinstance(row, Mapping):
            return Row(where, None, f"is no JSON object but {type(row).__name__}")
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
        if self.function is not None:
            try:
                found = imported(self.function)(row)
            except Exception as error:  # any error of the user's function is about this row
                raise ValueError(f"makes {self.function} raise {error!r}") from error
        elif self.column in row:
            found = row[self.column]
        else:
            raise ValueError(
                f"has no column {self.column!r}; it has {', '.join(map(repr, row))}: choose one "
                "with --text_column"
            )
        if not isinstance(found, str):
            raise ValueError(f"has no string in {source} but {found!r:.40}")
        return found


@functools.cache
def imported(function: str) -> Callable[[Mapping[str, Any]], Any]:
    """The text function; raises ValueError if it cannot be imported."""
    module, _, name = function.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"cannot import the text function {function!r}, which should be given as "
            f"package.module:function: {error}"
        ) from error
    if not callable(loaded):
        raise ValueError(f"the text function {function!r} is {loaded!r}, no function")
    return loaded


class Block(NamedTuple):
    """Consecutive rows of a source, as they were read.

    Attributes:
      position: the place where the block begins, in JSON values.
      fraction: the share of the source up to the end of this block; None if unknown.
      size: bytes of memory that the rows take, about.
      content: the rows as they were read.
      rows_of: makes rows of the content; a function of a module, which other processes can import.
      lines_of: the file of lines whose bytes the places of rows name, if it is one.
    """

    position: Any
    fraction: float | None
    size: int
    content: Any
    rows_of: Callable[[Any, Field], Iterator[Row]]
    lines_of: str | None = None

    def rows(self, field: Field) -> Iterator[Row]:
        """The rows, with their texts."""
        return self.rows_of(self.content, field)

    def locate(self, row: Row) -> Row:
        """The row with its line number, for which the file is read up to there."""
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
    """Rows in a fixed order, which can be cut into shards and entered in the middle."""

    field: Field

    @property
    def description(self) -> dict[str, Any]:
        """The rows and their origin, in JSON values, for the record."""

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """The blocks of one shard, from the one that began at `position`.

        The shards' rows, one after the other, are all rows once; `shards` may be any number.
        """


def bad_row(block: Block, row: Row) -> ValueError:
    """The error that names a row and its problem."""
    return ValueError(
        f"{block.locate(row)}: repair it, or pass over such rows with --on_bad_row=skip"
    )


class SkippedRows:
    """Prints the first rows that are left out to stderr."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, block: Block | None, row: Row) -> None:
        """`block` may locate the row."""
        self._count += 1
        if self._count <= _SHOWN:
            print(f"skipped: {block.locate(row) if block else row}", file=sys.stderr, flush=True)
        if self._count == _SHOWN:
            print("further skipped rows are not shown", file=sys.stderr, flush=True)


def utf8_row(content: bytes, where: str) -> Row:
    """A row whose text is `content`."""
    try:
        return Row(where, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(where, None, f"is not UTF-8 text (byte {error.start})")
