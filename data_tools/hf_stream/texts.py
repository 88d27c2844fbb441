"""The texts of a stream's records, and what becomes of records that have none."""

import sys
from dataclasses import dataclass
from typing import Literal

OnBadRow = Literal["fail", "skip"]

SHOWN = 10  # lines about records that are left out


@dataclass(frozen=True)
class TextColumn:
    """Where records have their text, and how much of it the tokenizer takes at once."""

    name: str
    max_bytes: int | None  # of UTF-8; None: any

    def text(self, record: object) -> str:
        """The text of `record`; raises ValueError, saying what the record is, if it has none."""
        if not isinstance(record, dict):
            raise ValueError(f"is no mapping of columns but {type(record).__name__}")
        if self.name not in record:
            raise ValueError(
                f"has no column {self.name!r}; it has {', '.join(map(repr, record)) or 'none'}: "
                "choose one as text_column"
            )
        text = record[self.name]
        if not isinstance(text, str):
            raise ValueError(f"has no string in column {self.name!r} but {text!r:.40}")
        try:
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ValueError(
                f"holds a lone surrogate at character {error.start}, which UTF-8 cannot express"
            ) from error
        if self.max_bytes is not None and size > self.max_bytes:
            raise ValueError(
                f"has {size:,} bytes of text, but this tokenizer takes at most "
                f"{self.max_bytes:,} at once: cut it into several records"
            )
        return text


class BadRecords:
    """What becomes of the records without a usable text."""

    def __init__(self, on_bad_row: OnBadRow) -> None:
        self._skip = on_bad_row == "skip"
        self._count = 0

    def meet(self, problem: str) -> None:
        """Tells of such a record on stderr; raises ValueError if they are not to be left out.

        Of many, the first ten are shown.
        """
        if not self._skip:
            raise ValueError(f"{problem}; on_bad_row='skip' leaves such records out")
        self._count += 1
        if self._count <= SHOWN:
            print(f"skipped: {problem}", file=sys.stderr, flush=True)
        if self._count == SHOWN:
            print("further skipped records are not shown", file=sys.stderr, flush=True)
