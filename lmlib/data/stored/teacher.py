"""A teacher's most likely ids for each token of a split, on disk.

docs/objectives.md has the format. Shapes: B batch (rows), S sequence, K ids that the teacher found
most likely after a token.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.journal import FILE_LENGTH, FolderWriter
from lmlib.data.stored.metadata import (
    FILE_NAME,
    DamagedDataError,
    check_entries,
    digest,
    read_signed,
    write_signed,
)
from lmlib.data.stored.token_arrays import INTEGERS, StoredArray, reading_context
from lmlib.storage.local_folder import shown

FORMAT = "lmlib stored teacher"
VERSION = 1
IDS, LOG_PROBABILITIES = "ids", "log_probabilities"
DTYPE = np.float16  # for log-probabilities: 3 bits more than bfloat16, and -65,504 is low enough
_LARGEST_ROW = 2**26 - 1  # elements: a chunk of 256 MiB at most, checksum included
USUAL_K = 32  # ids listed per token


@dataclass(frozen=True)
class Sequences:
    """The sequences that a teacher saw, without their order; settings as in `FlatTokens`."""

    data: str  # a digest of the split's arrays
    split: str
    sequences: int  # their number
    sequence_length: int
    packed: bool
    reset_positions: bool
    attend_across_documents: bool
    begin_with_documents: bool = False


@dataclass(frozen=True)
class TeacherMetadata:
    """The content of metadata.json."""

    teacher: str  # the source of its weights: `WORKDIR@STEP`, or a folder's name
    fingerprint: str  # of its weights, from `lmlib.parallel.fingerprint.fingerprint`
    vocab_size: int  # of the teacher; ids are in [0, vocab_size)
    k: int  # ids listed for each token
    sequences: Sequences
    digests: Mapping[str, str]  # of each array

    @property
    def row_elements(self) -> int:
        """Elements of one sequence in each array, the unit of reading."""
        return self.sequences.sequence_length * self.k

    def write(self, folder: Path) -> None:
        """Writes metadata.json atomically and durably."""
        write_signed(folder / FILE_NAME, FORMAT, VERSION, asdict(self))


def read_metadata(folder: Path) -> TeacherMetadata:
    """Reads metadata.json of a finished teacher.

    Raises FileNotFoundError if there is none, ValueError for damage or another version.
    """
    file, command = folder / FILE_NAME, "python -m runner.cache_teacher_logits"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} holds no teacher, or an unfinished one: it has no {FILE_NAME}, which is "
            f"written last; {command} makes it, and continues an unfinished one"
        )

    def made(content: dict[str, Any]) -> TeacherMetadata:
        content["sequences"] = Sequences(**content["sequences"])
        metadata = TeacherMetadata(**content)
        check_entries(metadata)
        check_entries(metadata.sequences)
        if set(metadata.digests) != {IDS, LOG_PROBABILITIES} or metadata.row_elements < 1:
            raise ValueError(f"its digests are {metadata.digests!r:.80} and k {metadata.k}")
        if metadata.k > metadata.vocab_size:
            raise ValueError(f"it lists {metadata.k} of {metadata.vocab_size} ids")
        return metadata

    return read_signed(file, FORMAT, VERSION, made, f"make it again with {command}")


class StoredTeacher:
    """An output folder of `python -m runner.cache_teacher_logits`, opened for reading."""

    def __init__(self, folder: str, sequences: Sequences) -> None:
        """Opens it for `sequences`.

        Raises FileNotFoundError if it is missing or unfinished, ValueError if it saw other
        sequences or (DamagedDataError) is damaged.
        """
        self.folder = data_path(folder)
        self.metadata = read_metadata(self.folder)
        seen = asdict(self.metadata.sequences)
        for name, value in asdict(sequences).items():
            if seen[name] != value:
                raise ValueError(
                    f"the teacher in {self.folder} saw other sequences: it has {name} "
                    f"{seen[name]!r}, and this data {value!r}; give the same settings, or run "
                    "python -m runner.cache_teacher_logits for these into another folder"
                )
        length, context = sequences.sequences * self.metadata.row_elements, reading_context()
        dtypes = {IDS: INTEGERS, LOG_PROBABILITIES: {np.dtype(DTYPE).name}}
        self._arrays = [
            StoredArray(self.folder / name, length, context, self.metadata.digests[name], kinds)
            for name, kinds in dtypes.items()
        ]
        for array in self._arrays:
            array.check_files()
            array.read(0, 1)()  # the first read shows if the array is another teacher's

    def contents(self) -> dict[str, str]:
        """Returns the folder and a digest of its arrays; see `lmlib.data.batch.Stored`."""
        of_arrays = json.dumps(dict(self.metadata.digests), sort_keys=True)
        return {shown(self.folder): digest(of_arrays.encode())}

    def read(self, sequence_B: np.ndarray) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Starts reading the entries of each sequence; returns a function that waits for them.

        It returns ids (int32) and log-probabilities (float16), both (b, s, k), zero for sequence
        -1, and raises DamagedDataError for unreadable data or an id outside the vocabulary.
        """
        step = self.metadata.row_elements
        coming = [
            [] if start < 0 else [array.read(start, start + step) for array in self._arrays]
            for start in (sequence_B * step).tolist()
        ]
        shape = len(coming), self.metadata.sequences.sequence_length, self.metadata.k

        def entries() -> tuple[np.ndarray, np.ndarray]:
            ids, log_probabilities = np.zeros(shape, np.int32), np.zeros(shape, DTYPE)
            for row, pair in enumerate(coming):
                if pair:
                    ids[row], log_probabilities[row] = (read().reshape(shape[1:]) for read in pair)
            if ids.size and not 0 <= ids.min() <= ids.max() < self.metadata.vocab_size:
                raise DamagedDataError(f"a stored teacher has ids from {ids.min()} to {ids.max()}")
            return ids, log_probabilities

        return entries


class TeacherWriter(FolderWriter):
    """Writes the folder described by `metadata`; the digests are computed at the end."""

    def __init__(
        self, folder: str, metadata: TeacherMetadata, file_elements: int = FILE_LENGTH
    ) -> None:
        """Begins the folder, or continues an unfinished one of the same teacher and sequences.

        A file holds whole sequences, of about `file_elements` elements. Raises as `FolderWriter`,
        and ValueError if a sequence has too many elements.
        """
        self._metadata, self._step = metadata, metadata.row_elements
        if self._step > _LARGEST_ROW:
            raise ValueError(
                f"{metadata.k:,} ids for each of {metadata.sequences.sequence_length:,} tokens are "
                f"more than {_LARGEST_ROW:,} numbers for a sequence: take a smaller k"
            )
        rows = max(1, file_elements // self._step)
        ids = np.uint16 if metadata.vocab_size <= 2**16 else np.uint32
        super().__init__(
            data_path(folder),
            asdict(metadata) | {"file": rows},
            {IDS: ids, LOG_PROBABILITIES: DTYPE},
            rows * self._step,
            self._step,
        )
        self._added = self.written

    @property
    def written(self) -> int:
        """Number of sequences safely on disk; a new writer is given those after them."""
        return self._journal.written // self._step

    def add(self, ids_BSK: np.ndarray, log_probabilities_BSK: np.ndarray) -> None:
        """Appends the next sequences; log-probabilities are rounded to float16."""
        rounded_BSK = np.maximum(log_probabilities_BSK, np.finfo(DTYPE).min).astype(DTYPE)
        values = [each.reshape(-1) for each in (ids_BSK, rounded_BSK)]
        self._add(values, self._added * self._step)
        self._added += len(ids_BSK)

    def finish(self) -> TeacherMetadata:
        """Writes the rest, then metadata.json. No other method works afterwards.

        Raises ValueError if sequences are missing.
        """
        if self._added != self._metadata.sequences.sequences:
            raise ValueError(
                f"{self._added:,} of {self._metadata.sequences.sequences:,} sequences were added"
            )
        self._write()
        metadata = replace(self._metadata, digests=self._digests((IDS, LOG_PROBABILITIES)))
        self._finish_folder(metadata)
        return metadata
