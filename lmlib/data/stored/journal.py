"""Arrays that are written file by file, and continued after a kill: of shards and of teachers.

A folder that is being written has a journal and a lock. The bytes of a finished folder do not
depend on interruptions. docs/flat-tokens.md describes the files.
"""

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorstore as ts

from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import FILE_NAME, JOURNAL_FILE, Totals, check_entries
from lmlib.data.stored.token_arrays import (
    CHUNK_DIGESTS,
    StoredArray,
    codecs,
    digest_of_array,
    digests_of_chunks,
)
from lmlib.storage.atomic_file import UNFINISHED, make_folder, write_atomically
from lmlib.storage.stored_json import read_json

LOCK_FILE = "writer.lock"
CHUNK_LENGTH = 16 * 1024  # tokens; the unit of reading, and of checksums
FILE_LENGTH = 16 * 1024 * 1024  # tokens in one file, the unit of writing
STARTS_FILE = "document_starts.partial"  # little-endian uint64, of the marked documents


@dataclass(frozen=True)
class Journal:
    """A state from which a writer can continue, stored in journal.json.

    `written` elements are on disk in complete files. Those not counted in `marked` come again when
    the documents from `position` on are appended again.
    """

    settings: Mapping[str, Any]  # of the writer; a later writer must have the same
    position: Any = None  # the mark in the source, as JSON values; None at its beginning
    marked: Totals = field(default_factory=Totals)
    written: int = 0


def read_journal(folder: Path) -> Journal:
    """Reads journal.json.

    Raises FileNotFoundError if it is absent, ValueError if it is damaged.
    """
    file = folder / JOURNAL_FILE
    try:
        content = read_json(file)
        journal = Journal(marked=Totals(**content.pop("marked")), **content)
        check_entries(journal)
        check_entries(journal.marked)
        return journal
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged ({error!r}): delete {folder} to make the shard from its beginning"
        ) from error


def difference(name: str, found: Any, wanted: Any) -> str:
    """Describes how `found` differs from `wanted`; for mappings, the first entry that differs."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for entry in (*wanted, *found):
            if found.get(entry) != wanted.get(entry):
                return difference(f"{name} {entry}", found.get(entry), wanted.get(entry))
    return f"{name} {found!r}, not {wanted!r}"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Adds the folder to an error that names no file, for example on a full disk."""
    try:
        yield
    except (OSError, ValueError) as error:  # TensorStore raises only ValueError
        cause: object = error
        if isinstance(error, OSError):
            if error.errno is None or error.filename is not None:
                raise
            cause = error.strerror
        raise OSError(
            f"{folder} cannot be written: {cause}; what was written before is kept: free space or "
            "repair access, and run the same command again"
        ) from error


class NumberFile:
    """Numbers of an unfinished folder in a separate file, as little-endian uint64."""

    def __init__(self, file: Path, count: int, folder: Path) -> None:
        """Opens the file and truncates it to `count`; raises ValueError if it holds fewer."""
        self._file = file
        with open(file, "ab") as stream:
            if stream.tell() < 8 * count:
                raise ValueError(
                    f"{file} lost its end: delete {folder} to make the shard from its beginning"
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
        self, folder: Path, dtype: Any, file_length: int, chunk_length: int, written: int = 0
    ) -> None:
        """Begins the array in `folder`, or continues after its first `written` elements.

        `file_length` must be a multiple of `chunk_length`. Raises ValueError or OSError if there
        are fewer elements, or their layout is wrong.
        """
        self._folder, self._dtype, self._chunk_length = folder, np.dtype(dtype), chunk_length
        spec: dict[str, Any] = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{data_path(folder)}/"},
            # Zeros are stored explicitly, so that an absent chunk is always a lost one.
            "store_data_equal_to_fill_value": True,
        }
        if written:
            found = StoredArray(folder, None, ts.Context(), dtypes=[self._dtype.name])
            found.file_sizes()  # checks that the files are regular
            self._array = _resized(ts.open(spec, open=True).result(), written)
        else:
            grid = {"name": "regular", "configuration": {"chunk_shape": [file_length]}}
            spec["metadata"] = {
                "shape": [0],
                "data_type": self._dtype.name,
                "chunk_grid": grid,
                "codecs": codecs(chunk_length),
            }
            self._array = ts.open(spec, create=True, delete_existing=True).result()
        self._stored_before = written
        chunks = written // chunk_length
        self._digests = NumberFile(folder / CHUNK_DIGESTS, chunks, folder.parent)
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
        """Writes the first `length` buffered elements; raises OSError on failure.

        They must be complete files or the last elements: other files would be read and rewritten.
        """
        buffered = np.concatenate([np.zeros(0, self._dtype), *self._buffer])
        if length:
            start = self._array.shape[0]
            with writing(self._folder):
                self._array = _resized(self._array, start + length)
                self._array[start:].write(buffered[:length]).result()
                self._digests.append(digests_of_chunks(buffered[:length], self._chunk_length))
        self._buffer, self.buffered = [buffered[length:]], len(buffered) - length


class FolderWriter:
    """Appends to arrays of one length in a folder; `_finish_folder` makes it readable."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        arrays: Mapping[str, Any],
        file_length: int,
        chunk_length: int,
        others: Collection[str] = (),
    ) -> None:
        """Begins the folder, or continues an unfinished one with the same settings.

        `arrays` has the dtype of each array by name, `others` the names of further files that the
        folder may have. Settings may change until the first file is written.

        Raises FileExistsError if it is finished, being written or begun with other settings, or
        holds other files; ValueError if it is damaged.
        """
        self.folder, self._names = folder, (*arrays, *others)
        self._check_folder()
        make_folder(folder)
        self._lock = lock(folder)
        try:
            self._check_folder()  # it may have been finished before the lock was taken
            self._journal = Journal(settings)
            if (folder / JOURNAL_FILE).exists() and (found := read_journal(folder)).written:
                for name, value in settings.items():
                    if found.settings.get(name) != value:
                        raise FileExistsError(
                            f"{folder} was begun with "
                            f"{difference(name, found.settings.get(name), value)}: give the same "
                            "settings, or another folder, or delete it"
                        )
                self._journal = found
            _remove_unrenamed(folder)
            self._arrays = [
                GrowingArray(folder / name, dtype, file_length, chunk_length, self._journal.written)
                for name, dtype in arrays.items()
            ]
            self._save_journal()
        except BaseException:
            self.close()
            raise
        self._file_length = file_length

    def _add(self, values: Sequence[np.ndarray], start: int) -> None:
        """Adds elements from `start` on to each array, and writes the files that are complete."""
        for array, elements in zip(self._arrays, values, strict=True):
            array.add(elements, start)
        buffered = self._arrays[0].buffered
        if buffered >= self._file_length:
            self._write(buffered - buffered % self._file_length)
            self._save_journal()

    def _write(self, length: int | None = None) -> None:
        """Writes the first `length` buffered elements of each array; all of them by default."""
        length = self._arrays[0].buffered if length is None else length
        for array in self._arrays:
            array.write(length)
        self._journal = replace(self._journal, written=self._journal.written + length)

    def _save_journal(self) -> None:
        """Makes the present state the one from which a later writer continues."""
        with writing(self.folder):
            text = json.dumps(asdict(self._journal), indent=2) + "\n"
            write_atomically(self.folder / JOURNAL_FILE, text)

    def _digests(self, names: Collection[str]) -> dict[str, str]:
        """Returns the digests of the arrays with these names."""
        return {name: digest_of_array(self.folder / name) for name in names}

    def _finish_folder(self, metadata: Any) -> None:
        """Writes metadata.json. No other method works afterwards."""
        with writing(self.folder):
            metadata.write(self.folder)
        remove_leftovers(self.folder)
        self.close()

    def close(self) -> None:
        """Releases the folder, so that another writer can continue."""
        self._lock.close()

    def _check_folder(self) -> None:
        for path in (self.folder, *self.folder.rglob("*")):
            if path.is_symlink():
                raise FileExistsError(f"{path} is a link, and no writer makes any: delete it")
        if (self.folder / FILE_NAME).exists():
            raise FileExistsError(
                f"{self.folder} is already finished: delete it first to make it again"
            )
        # A kill may leave an unfinished file of `write_atomically`.
        found = {path.name for path in self.folder.glob("*") if path.suffix != UNFINISHED}
        if strangers := sorted(found - {*self._names, JOURNAL_FILE, LOCK_FILE}):
            raise FileExistsError(
                f"{self.folder} holds {strangers[0]!r}, which was not made by this command: choose "
                "another folder"
            )


def _resized(array: ts.TensorStore, length: int) -> ts.TensorStore:
    return array.resize(exclusive_max=[length], resize_metadata_only=True).result()


def lock(folder: Path) -> BinaryIO:
    """Locks a folder against a second writer until the result is closed, or this process ends.

    Raises FileExistsError if another process holds the lock, OSError if locking fails.
    """
    stream = open(folder / LOCK_FILE, "ab")  # noqa: SIM115 (held until it is closed)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        if isinstance(error, BlockingIOError):
            raise FileExistsError(
                f"another process is writing {folder}: wait for it, or end it"
            ) from error
        raise OSError(
            f"{folder} cannot be locked ({error}): choose a folder on a file system that has locks"
        ) from error
    return stream


def remove_leftovers(folder: Path) -> None:
    """Removes the files that only an unfinished folder needs."""
    for name in (JOURNAL_FILE, STARTS_FILE, LOCK_FILE):
        (folder / name).unlink(missing_ok=True)
    _remove_unrenamed(folder)


def _remove_unrenamed(folder: Path) -> None:
    """Removes files that a killed process had not yet renamed, the last step of a write.

    TensorStore would write into such a file again without truncating it, so that a longer one
    keeps its end.
    """
    for file in (*folder.glob(f".*{UNFINISHED}"), *folder.rglob("*.__lock")):
        file.unlink(missing_ok=True)
