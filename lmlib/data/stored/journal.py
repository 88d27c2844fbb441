"""journal.json: how far the writing of a shard has come, so that it goes on after being killed."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.metadata import JOURNAL_FILE
from lmlib.storage.stored_json import read_json
from lmlib.storage.whole_file import write_whole

LOCK_FILE = "writer.lock"
STARTS_FILE = "document_starts.partial"  # little-endian uint64, of the marked documents


@dataclass(frozen=True)
class Totals:
    """What a shard holds up to some document."""

    tokens: int = 0
    documents: int = 0
    targets: int = 0
    bytes: int = 0
    gzip_bytes: int | None = 0
    skipped_rows: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    cut_documents: int = 0
    cut_tokens: int = 0
    max_token_id: int = -1

    def plus(self, lengths: np.ndarray, targets: int, **more: Any) -> "Totals":
        """With documents of `lengths` tokens added; `more` replaces other entries."""
        tokens = int(lengths.sum())
        return replace(
            self,
            tokens=self.tokens + tokens,
            documents=self.documents + len(lengths),
            targets=self.targets + targets,
            **more,
        )


@dataclass(frozen=True)
class Journal:
    """A state of a shard that a writer can go on from.

    `written` tokens are on disk in whole files. The first of them that `marked` does not count
    come again when the documents from `position` on are appended again.
    """

    settings: Mapping[str, Any]  # of the writer; another writer must have the same
    position: Any = None  # where in the source the mark is, in JSON values; None at its beginning
    marked: Totals = Totals()
    written: int = 0

    def save(self, folder: Path) -> None:
        write_whole(folder / JOURNAL_FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_journal(shard_folder: Path) -> Journal:
    """Raises FileNotFoundError if there is none, ValueError if it is damaged."""
    file = shard_folder / JOURNAL_FILE
    try:
        content = read_json(file)
        journal = Journal(marked=Totals(**content.pop("marked")), **content)
        _check_types(journal)
        return journal
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged ({error!r}): delete {shard_folder} to make the shard from its "
            "beginning"
        ) from error


def _check_types(journal: Journal) -> None:
    if not isinstance(journal.settings, dict):
        raise ValueError(f"its settings are {journal.settings!r:.40}")
    totals = asdict(journal.marked)
    least = {"max_token_id": -1}
    for name, value in {**totals, "written": journal.written}.items():
        if name == "gzip_bytes" and value is None:
            continue
        if type(value) is not int or not least.get(name, 0) <= value < 2**62:
            raise ValueError(f"its {name} is {value!r:.40}")


@contextmanager
def writing(shard_folder: Path) -> Iterator[None]:
    """Adds the folder to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(
            f"{shard_folder} cannot be written: {error.strerror}; what was written before is kept: "
            "free space or repair access, and run the same command again"
        ) from error


class NumberFile:
    """Numbers of an unfinished shard in a file of their own, as little-endian uint64."""

    def __init__(self, file: Path, count: int, shard_folder: Path) -> None:
        """Opens the file and cuts it to `count`; raises ValueError if it holds fewer."""
        self._file = file
        with open(self._file, "ab") as stream:
            if stream.tell() < 8 * count:
                raise ValueError(
                    f"{self._file} lost its end: delete {shard_folder} to make the shard from its "
                    "beginning"
                )
            stream.truncate(8 * count)

    def append(self, numbers: np.ndarray) -> None:
        """Adds `numbers` durably."""
        with open(self._file, "ab") as stream:
            stream.write(numbers.astype("<u8").tobytes())
            stream.flush()
            os.fsync(stream.fileno())

    def all(self) -> np.ndarray:
        """All numbers, uint64, mapped from the file and not read."""
        if self._file.stat().st_size == 0:
            return np.zeros(0, "<u8")
        return np.memmap(self._file, "<u8", mode="r")


class WriterLock:
    """Keeps a second writer away from a shard while the first one lives."""

    def __init__(self, shard_folder: Path) -> None:
        """Raises FileExistsError if another process holds the lock, OSError if none can be had."""
        self._stream = open(shard_folder / LOCK_FILE, "ab")  # noqa: SIM115 (held until release)
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._stream.close()
            raise FileExistsError(
                f"another process is writing {shard_folder}: wait for it, or end it"
            ) from error
        except OSError as error:
            self._stream.close()
            raise OSError(
                f"{shard_folder} cannot be locked ({error}): choose a folder on a file system that "
                "has locks"
            ) from error

    def release(self) -> None:
        self._stream.close()
