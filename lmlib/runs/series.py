"""The numbers of metrics.jsonl as columns, for files of up to millions of lines."""

import array
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, Int

from lmlib.metrics.log import FILE_NAME
from lmlib.storage.stored_json import parse_json
from lmlib.storage.unlinked import check_no_link

_Columns: TypeAlias = dict[str, tuple["array.array[int]", "array.array[float]"]]


class Series(NamedTuple):
    """The N measurements of one metric, in order."""

    steps_N: Int[np.ndarray, "N"]
    values_N: Float[np.ndarray, "N"]


class Measurements:
    """Follows `workdir/metrics.jsonl`, also while a run writes it; empty if the file is absent.

    `update` reads the new lines, and the last line again, since a run may add to it. A file that a
    resumed run has rewritten is read from its beginning. Damaged lines are skipped.
    """

    def __init__(self, workdir: str | os.PathLike[str]):
        self._path = Path(workdir) / FILE_NAME
        self._forget()

    def _forget(self) -> None:
        self._columns: _Columns = {}
        self._file: tuple[int, int] | None = None
        # The last complete line: its offset, its bytes, and its entry, not in the columns yet.
        self._last_begins, self._last = 0, b""
        self._newest: dict[str, Any] = {}

    def update(self) -> None:
        """Reads new lines; raises OSError, naming the file, if it is unreadable or a link."""
        check_no_link(self._path)
        try:
            with open(self._path, "rb") as file:
                self._read_on(file)
        except FileNotFoundError:
            self._forget()

    def _read_on(self, file: BinaryIO) -> None:
        found = os.fstat(file.fileno())
        file.seek(self._last_begins)
        known = self._last.rstrip(b"}\n")
        if (found.st_dev, found.st_ino) != self._file or file.read(len(known)) != known:
            self._forget()
            self._file = found.st_dev, found.st_ino
        begins = file.seek(self._last_begins)
        line = file.readline()
        if not line.endswith(b"\n"):  # a run is writing it
            return
        newest = _parsed(line) or self._newest
        for following in file:
            if not following.endswith(b"\n"):
                break
            _add(self._columns, newest)
            begins += len(line)
            line, newest = following, _parsed(following)
        self._last_begins, self._last, self._newest = begins, line, newest

    @property
    def series(self) -> Mapping[str, Series]:
        """The metrics as of the last `update`, by name; "step" is one of them."""
        columns = {name: (steps[:], values[:]) for name, (steps, values) in self._columns.items()}
        _add(columns, self._newest)
        return {name: Series(*map(np.asarray, each)) for name, each in columns.items()}


def _add(columns: _Columns, entry: dict[str, Any]) -> None:
    for name, value in entry.items():
        if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
            value = float(value)
        if type(value) is float or (type(value) is int and abs(value) < 1 << 63):
            steps, values = columns.setdefault(name, (array.array("q"), array.array("d")))
            steps.append(entry["step"])
            values.append(value)


def _parsed(line: bytes) -> dict[str, Any]:
    """Returns the entry in a line; empty if the line is damaged."""
    with contextlib.suppress(ValueError):
        found = parse_json(line)
        step = found.get("step") if isinstance(found, dict) else None
        if type(step) is int and 0 <= step < 1 << 63:
            return found
    return {}
