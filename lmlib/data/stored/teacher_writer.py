"""Writes what a teacher says of each token of a split; `StoredTeacher` reads it.

A writer can be killed at any moment: the next one goes on after the last whole files.

Shapes: B batch (rows), S sequence, K ids that the teacher found likeliest after a token.
"""

from dataclasses import asdict, replace

import numpy as np

from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.digests import digest_of_array
from lmlib.data.stored.growing_array import GrowingArray
from lmlib.data.stored.journal import LOCK_FILE, Journal, WriterLock, read_journal, writing
from lmlib.data.stored.metadata import JOURNAL_FILE
from lmlib.data.stored.shard_writer import remove_leftovers
from lmlib.data.stored.teacher import DTYPE, FILE_NAME, IDS, LOG_PROBABILITIES, TeacherMetadata
from lmlib.data.stored.token_arrays import FILE_LENGTH
from lmlib.storage.whole_file import UNFINISHED, make_folder

_LARGEST_ROW = 2**26 - 1  # elements: a chunk of 256 MiB at most, checksum included


class TeacherWriter:
    """Writes the folder that `metadata` describes; its digests are found at the end.

    Attributes:
      written: sequences that are on disk for good; `add` goes on after them.
    """

    def __init__(
        self, folder: str, metadata: TeacherMetadata, file_elements: int = FILE_LENGTH
    ) -> None:
        """Begins the folder, or goes on with an unfinished one of the same teacher and sequences.

        Args:
          file_elements: about how many a file has, whole sequences in any case.

        Raises:
          FileExistsError: if it is finished, being written, of another teacher or other sequences,
            or holds something else.
          ValueError: if a sequence has too many elements, or what is there is damaged.
        """
        self.folder = data_path(folder)
        self._metadata = metadata
        step = metadata.row_elements
        if step > _LARGEST_ROW:
            raise ValueError(
                f"{metadata.k:,} ids for each of {metadata.sequences.sequence_length:,} tokens are "
                f"more than {_LARGEST_ROW:,} numbers for a sequence: take a smaller k"
            )
        if (self.folder / FILE_NAME).exists():
            raise FileExistsError(f"{self.folder} is finished: delete it first to make it again")
        make_folder(self.folder)
        there = {entry.name for entry in self.folder.iterdir() if entry.suffix != UNFINISHED}
        if there - {LOCK_FILE} and JOURNAL_FILE not in there:
            raise FileExistsError(f"{self.folder} holds something else: choose another folder")
        self._lock = WriterLock(self.folder)
        try:
            self._file_rows = max(1, file_elements // step)
            self._journal = self._begun(Journal(asdict(metadata) | {"file": self._file_rows}))
            self.written = self._journal.written // step
            lengths = {"file_length": self._file_rows * step, "chunk_length": step}
            dtypes = {IDS: np.uint16 if metadata.vocab_size <= 2**16 else np.uint32}
            written = self._journal.written or None
            self._arrays = [
                GrowingArray(self.folder / name, dtype, written=written, **lengths)
                for name, dtype in (dtypes | {LOG_PROBABILITIES: DTYPE}).items()
            ]
        except BaseException:
            self._lock.release()
            raise
        self._added = self.written

    def add(self, ids_BSK: np.ndarray, log_probabilities_BSK: np.ndarray) -> None:
        """Adds the next sequences; log-probabilities are rounded to float16."""
        step = self._metadata.row_elements
        lowest = np.finfo(DTYPE).min
        rounded_BSK = np.maximum(log_probabilities_BSK, lowest).astype(DTYPE)
        for array, values in zip(self._arrays, (ids_BSK, rounded_BSK), strict=True):
            array.add(values.reshape(-1), self._added * step)
        self._added += len(ids_BSK)
        whole_rows = (self._added - self.written) // self._file_rows * self._file_rows
        if whole_rows:
            self._write(whole_rows)

    def finish(self) -> TeacherMetadata:
        """Writes what is left, then metadata.json. No other method works afterwards.

        Raises ValueError if there are fewer sequences than were promised.
        """
        if self._added != self._metadata.sequences.sequences:
            raise ValueError(
                f"{self._added:,} of {self._metadata.sequences.sequences:,} sequences were added"
            )
        self._write(self._added - self.written)
        digests = {name: digest_of_array(self.folder / name) for name in (IDS, LOG_PROBABILITIES)}
        metadata = replace(self._metadata, digests=digests)
        with writing(self.folder):
            metadata.write(self.folder)
        remove_leftovers(self.folder)
        self._lock.release()
        return metadata

    def close(self) -> None:
        """Lets another writer go on."""
        self._lock.release()

    def _begun(self, fresh: Journal) -> Journal:
        """The journal that is there, or `fresh`, saved."""
        if not (self.folder / JOURNAL_FILE).exists():
            fresh.save(self.folder)
            return fresh
        found = read_journal(self.folder)
        for name, value in fresh.settings.items():
            if found.settings.get(name) != value:
                raise FileExistsError(
                    f"{self.folder} was begun with {name} {found.settings.get(name)!r}, not "
                    f"{value!r}: give the same settings, or another folder, or delete it"
                )
        return found

    def _write(self, rows: int) -> None:
        elements = rows * self._metadata.row_elements
        for array in self._arrays:
            array.write(elements)
        self.written += rows
        self._journal = replace(self._journal, written=self._journal.written + elements)
        with writing(self.folder):
            self._journal.save(self.folder)
