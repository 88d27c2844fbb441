"""Components of an unfinished shard: lock, journal, growing arrays and number files."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorstore as ts

from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import JOURNAL_FILE, Totals, check_counts
from lmlib.data.stored.token_arrays import CHUNK_DIGESTS, StoredArray, codecs, digests_of_chunks
from lmlib.storage.atomic_file import UNFINISHED, write_atomically
from lmlib.storage.stored_json import read_json

LOCK_FILE = "writer.lock"
CHUNK_LENGTH = 16 * 1024  # tokens; the unit of reading, and of checksums
FILE_LENGTH = 16 * 1024 * 1024  # tokens in one file, the unit of writing
STARTS_FILE = "document_starts.partial"  # little-endian uint64, of the marked documents


@dataclass(frozen=True)
class Journal:
    """A state of a shard from which a writer can continue, stored in journal.json.

    `written` tokens are on disk in complete files. Those not counted in `marked` come again when
    the documents from `position` on are appended again.
    """

    settings: Mapping[str, Any]  # of the writer; a later writer must have the same
    position: Any = None  # the mark in the source, as JSON values; None at its beginning
    marked: Totals = field(default_factory=Totals)
    written: int = 0

    def save(self, folder: Path) -> None:
        write_atomically(folder / JOURNAL_FILE, json.dumps(asdict(self), indent=2) + "\n")

    def check_settings(self, folder: Path, wanted: Mapping[str, Any]) -> None:
        """Raises FileExistsError if the shard in `folder` was begun with other settings."""
        for name, value in wanted.items():
            if self.settings.get(name) != value:
                raise FileExistsError(
                    f"{folder} was begun with {difference(name, self.settings.get(name), value)}: "
                    "give the same settings, or another folder, or delete it"
                )


def read_journal(shard_folder: Path) -> Journal:
    """Reads journal.json.

    Raises FileNotFoundError if it is absent, ValueError if it is damaged.
    """
    file = shard_folder / JOURNAL_FILE
    try:
        content = read_json(file)
        journal = Journal(marked=Totals(**content.pop("marked")), **content)
        if not isinstance(journal.settings, dict):
            raise ValueError(f"its settings are {journal.settings!r:.40}")
        check_counts(vars(journal.marked) | {"written": journal.written})
        return journal
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged ({error!r}): delete {shard_folder} to make the shard from its "
            "beginning"
        ) from error


def difference(name: str, found: Any, wanted: Any) -> str:
    """Describes how `found` differs from `wanted`; for mappings, the first entry that differs."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for entry in (*wanted, *found):
            if found.get(entry) != wanted.get(entry):
                return difference(f"{name} {entry}", found.get(entry), wanted.get(entry))
    return f"{name} {found!r}, not {wanted!r}"


@contextmanager
def writing(shard_folder: Path) -> Iterator[None]:
    """Adds the folder to an OSError that names no file, for example on a full disk."""
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
    """Numbers of an unfinished shard in a separate file, as little-endian uint64."""

    def __init__(self, file: Path, count: int, shard_folder: Path) -> None:
        """Opens the file and truncates it to `count`; raises ValueError if it holds fewer."""
        self._file = file
        with open(self._file, "ab") as stream:
            if stream.tell() < 8 * count:
                raise ValueError(
                    f"{self._file} lost its end: delete {shard_folder} to make the shard from its "
                    "beginning"
                )
            stream.truncate(8 * count)

    def append(self, numbers: np.ndarray) -> None:
        """Appends `numbers` durably."""
        with open(self._file, "ab") as stream:
            stream.write(numbers.astype("<u8").tobytes())
            stream.flush()
            os.fsync(stream.fileno())

    def all(self) -> np.ndarray:
        """Returns all numbers, uint64, memory-mapped."""
        if self._file.stat().st_size == 0:
            return np.zeros(0, "<u8")
        return np.memmap(self._file, "<u8", mode="r")


class GrowingArray:
    """Elements on disk in complete files, and buffered elements that do not fill a file yet."""

    def __init__(
        self,
        folder: Path,
        dtype: type[np.number],
        *,
        written: int | None,
        file_length: int,
        chunk_length: int,
    ) -> None:
        """Begins the array in `folder`, or continues after its first `written` elements.

        `file_length` must be a multiple of `chunk_length`. Raises ValueError or OSError if there
        are fewer elements, or their layout is wrong.
        """
        self._folder, self._dtype, self._chunk_length = folder, dtype, chunk_length
        spec: dict[str, Any] = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{data_path(folder)}/"},
            # Zeros are stored explicitly, so that an absent chunk is always a lost one.
            "store_data_equal_to_fill_value": True,
        }
        if written is None:
            grid = {"name": "regular", "configuration": {"chunk_shape": [file_length]}}
            spec["metadata"] = {
                "shape": [0],
                "data_type": np.dtype(dtype).name,
                "chunk_grid": grid,
                "codecs": codecs(chunk_length),
            }
            self._array = ts.open(spec, create=True, delete_existing=True).result()
        self._stored_before = written or 0
        self._digests = NumberFile(
            folder / CHUNK_DIGESTS, self._stored_before // chunk_length, folder.parent
        )
        if written is not None:
            found = StoredArray(folder, None, ts.Context(), dtypes=[np.dtype(dtype).name])
            found.file_sizes()  # checks that the files are regular
            self._array = self._resized(ts.open(spec, open=True).result(), written)
        self._buffer: list[np.ndarray] = []
        self.buffered = 0  # elements

    def add(self, values: np.ndarray, start: int) -> None:
        """Buffers `values`, the elements from `start` on, except those already on disk.

        Raises ValueError if they differ from the elements on disk.
        """
        values = values.astype(self._dtype, copy=False)
        again = min(max(self._stored_before - start, 0), len(values))
        if again:
            stored = self._array[start : start + again].read().result()
            if not np.array_equal(stored, values[:again]):
                raise ValueError(
                    f"the documents differ from those that {self._folder.parent} was begun with: "
                    "the source or the tokenizer has changed; delete it to make the shard anew"
                )
        self._buffer.append(values[again:])
        self.buffered += len(values) - again

    def write(self, length: int) -> None:
        """Writes the first `length` buffered elements.

        They must be complete files or the last elements, since other files would be read back and
        rewritten. Raises OSError on failure.
        """
        buffered = np.concatenate([np.zeros(0, self._dtype), *self._buffer])
        if length:
            start = self._array.shape[0]
            try:
                self._array = self._resized(self._array, start + length)
                self._array[start:].write(buffered[:length]).result()
            except ValueError as error:  # TensorStore raises nothing else
                raise OSError(
                    f"{self._folder} cannot be written: {error}; what was written before "
                    "is kept: free space or repair access, and run the same command again"
                ) from error
            with writing(self._folder.parent):
                self._digests.append(digests_of_chunks(buffered[:length], self._chunk_length))
        self._buffer, self.buffered = [buffered[length:]], len(buffered) - length

    def _resized(self, array: ts.TensorStore, length: int) -> ts.TensorStore:
        return array.resize(exclusive_max=[length], resize_metadata_only=True).result()


def lock(shard_folder: Path) -> BinaryIO:
    """Locks a shard against a second writer until the result is closed, or this process ends.

    Raises FileExistsError if another process holds the lock, OSError if locking fails.
    """
    stream = open(shard_folder / LOCK_FILE, "ab")  # noqa: SIM115 (held until it is closed)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        if isinstance(error, BlockingIOError):
            raise FileExistsError(
                f"another process is writing {shard_folder}: wait for it, or end it"
            ) from error
        raise OSError(
            f"{shard_folder} cannot be locked ({error}): choose a folder on a file system that "
            "has locks"
        ) from error
    return stream


def remove_leftovers(shard_folder: Path) -> None:
    """Removes the files that only an unfinished shard needs."""
    for file in (
        *(shard_folder / name for name in (JOURNAL_FILE, STARTS_FILE, LOCK_FILE)),
        *shard_folder.glob(f".*{UNFINISHED}"),  # left by a killed process, like the next
        *shard_folder.rglob("*.__lock"),  # TensorStore's
    ):
        file.unlink(missing_ok=True)
