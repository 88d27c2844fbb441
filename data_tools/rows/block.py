"""Blocks of rows, and how a text is taken out of a row."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

BLOCK_BYTES = 1024 * 1024  # of text, about; a longer row makes a longer block
MAX_ROW_BYTES = 128 * 1024 * 1024  # of a line or a text file; bounds the memory that a row takes
TOO_LONG = f"is longer than {MAX_ROW_BYTES // 2**20} MiB: cut it into several rows"


class Row(NamedTuple):
    """A row of the source, with its text or what is wrong with it."""

    where: str  # the file and the line or row in it
    text: str | None
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.where} {self.problem}"


class Field(ABC):
    """What of a row is its text."""

    @property
    @abstractmethod
    def needed(self) -> str | None:
        """The only column that is needed; None: all of them."""

    @property
    @abstractmethod
    def description(self) -> Any:
        """What the text is, in JSON values, for the record."""

    @abstractmethod
    def load(self) -> Callable[[Mapping[str, Any]], Any]:
        """The function from a row to its text; raises ValueError if it cannot be had."""

    def row(
        self,
        row: object,
        text: Callable[[Mapping[str, Any]], Any],
        where: str,
        filled_up: bool = False,
    ) -> Row:
        """The row with its text, or what is wrong with it; `text` comes from `load`.

        `filled_up`: a null may stand for an entry that the row lacks, as in Arrow's structs.
        """
        if not isinstance(row, Mapping):
            return Row(where, None, f"is no JSON object but {type(row).__name__}")
        return Row(where, *self.found(row, text, filled_up))

    @abstractmethod
    def found(self, row: Any, text: Callable[..., Any], filled_up: bool) -> tuple[str | None, str]:
        """The text of the row, or None and what is wrong with it; see `row`."""


@dataclass(frozen=True)
class TextField(Field):
    """A column, or what a Python function makes of the whole row."""

    column: str = "text"
    function: str | None = None  # "package.module:function", called with the row's dict

    @property
    def needed(self) -> str | None:
        """See `Field.needed`."""
        return self.column if self.function is None else None

    @property
    def description(self) -> str:
        """See `Field.description`."""
        return self.function or self.column

    def load(self) -> Callable[[Mapping[str, Any]], Any]:
        """See `Field.load`."""
        if self.function is None:
            return self._of_column
        module, _, name = self.function.partition(":")
        try:
            loaded = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"cannot import the text function {self.function!r}, which should be given as "
                f"package.module:function: {error}"
            ) from error
        if not callable(loaded):
            raise ValueError(f"the text function {self.function!r} is {loaded!r}, no function")
        return loaded

    def found(self, row: Any, text: Callable[..., Any], filled_up: bool) -> tuple[str | None, str]:
        """See `Field.found`."""
        try:
            found = text(row)
        except _NoColumnError as error:
            return None, str(error)
        except Exception as error:  # whatever the user's function raises is about this row
            return None, f"makes {self.function} raise {error!r}"
        if not isinstance(found, str):
            what = f"column {self.column!r}" if self.function is None else self.function
            return None, f"has no string in {what} but {found!r:.40}"
        return found, ""

    def _of_column(self, row: Mapping[str, Any]) -> Any:
        try:
            return row[self.column]
        except KeyError:
            raise _NoColumnError(
                f"has no column {self.column!r}; it has {', '.join(map(repr, row))}: choose one "
                "with --text_column"
            ) from None


class _NoColumnError(Exception):
    pass


@dataclass(frozen=True)
class Block(ABC):
    """Consecutive rows of a source, as they were read."""

    position: Any  # where the block begins, in JSON values
    fraction: float | None  # of what is to be read, after this block; None if unknown

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes of memory that the rows take, about."""

    @abstractmethod
    def rows(self, field: Field) -> Iterator[Row]:
        """The rows, with their texts."""

    def locate(self, row: Row) -> Row:
        """The row with a better `where`, if one can be had at some cost."""
        return row


@runtime_checkable
class RowSource(Protocol):
    """Rows in a fixed order, which can be cut into shards and entered in the middle."""

    field: Field

    @property
    def description(self) -> dict[str, Any]:
        """What the rows are and where they come from, in JSON values, for the record."""

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """The blocks of one shard, from the one that began at `position`.

        The shards' rows, one after the other, are all rows once; `shards` may be any number.
        """


def bad_row(block: Block, row: Row) -> ValueError:
    """The error that says what is wrong with a row, and where it is."""
    return ValueError(
        f"{block.locate(row)}: repair it, or pass over such rows with --on_bad_row=skip"
    )


def utf8_row(content: bytes, where: str) -> Row:
    """A row whose text is `content`."""
    try:
        return Row(where, content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(where, None, f"is not UTF-8 text (byte {error.start})")
