"""What a teacher said of each token of a split, on disk; docs/objectives.md has the format.

Shapes: B batch (rows), S sequence, K ids that the teacher found likeliest after a token.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.damage import DamagedDataError
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.digests import digest
from lmlib.data.stored.token_arrays import StoredArray, reading_context
from lmlib.storage.bucket.copies import shown
from lmlib.storage.stored_json import parse_json, read_text
from lmlib.storage.whole_file import write_whole

FORMAT = "lmlib stored teacher"
VERSION = 1
FILE_NAME = "metadata.json"
IDS, LOG_PROBABILITIES = "ids", "log_probabilities"
DTYPE = np.float16  # of log-probabilities: 3 bits more than bfloat16, and -65,504 is low enough
USUAL_K = 32  # ids that are listed of each token
_DIGEST = '  "digest"'  # how the last line of metadata.json but one begins


@dataclass(frozen=True)
class Sequences:
    """Which sequences a teacher saw: what they follow from, but for their order.

    Attributes:
      data: a digest of the split's arrays.
      sequences: how many there are.
      split, sequence_length, packed, reset_positions, attend_across_documents,
        begin_with_documents: as in `FlatTokens`.
    """

    data: str
    split: str
    sequences: int
    sequence_length: int
    packed: bool
    reset_positions: bool
    attend_across_documents: bool
    begin_with_documents: bool = False


@dataclass(frozen=True)
class TeacherMetadata:
    """The content of metadata.json.

    Attributes:
      teacher: whose weights it had: `WORKDIR@STEP`, or a folder's name.
      fingerprint: of its weights, as `lmlib.parallel.fingerprint.fingerprint` makes it.
      vocab_size: of the teacher; ids lie in [0, vocab_size).
      k: ids that are listed of each token.
      sequences: what it saw.
      digests: of each array.
    """

    teacher: str
    fingerprint: str
    vocab_size: int
    k: int
    sequences: Sequences
    digests: Mapping[str, str]

    @property
    def row_elements(self) -> int:
        """Elements of one sequence in each array: what is read at once."""
        return self.sequences.sequence_length * self.k

    def write(self, folder: Path) -> None:
        """Writes metadata.json atomically and durably."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        before = json.dumps(content, indent=2).removesuffix("\n}") + ",\n"
        write_whole(folder / FILE_NAME, f'{before}{_DIGEST}: "{digest(before.encode())}"\n}}\n')


def read_metadata(folder: Path) -> TeacherMetadata:
    """Raises FileNotFoundError if there is no finished teacher, ValueError for damage or another
    version."""
    file = folder / FILE_NAME
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} holds no teacher, or an unfinished one: it has no {FILE_NAME}, which is "
            "written last; python -m runner.teach makes it, and goes on where it stopped"
        )
    try:
        text = read_text(file)
        content = parse_json(text)
        found = content.pop("format"), content.pop("version")
        if found != (FORMAT, VERSION):
            raise ValueError(f"its format is {found[0]!r:.40}, version {found[1]!r:.40}")
        if content.pop("digest") != digest(text.rpartition(_DIGEST)[0].encode()):
            raise ValueError("it does not have the digest that it was written with")
        content["sequences"] = Sequences(**content["sequences"])
        metadata = TeacherMetadata(**content)
        _check_types(metadata)
        return metadata
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedDataError(
            f"{file} is damaged ({error!r}): make it again with python -m runner.teach"
        ) from error


class StoredTeacher:
    """A folder of `python -m runner.teach`, opened for reading."""

    def __init__(self, folder: str, sequences: Sequences) -> None:
        """Opens what a teacher said of `sequences`.

        Raises:
          FileNotFoundError: if there is none, or it is unfinished.
          ValueError: if it is of other sequences, or (DamagedDataError) damaged.
        """
        self.folder = data_path(folder)
        self.metadata = read_metadata(self.folder)
        check_same(self.folder, asdict(self.metadata.sequences), asdict(sequences))
        length, context = sequences.sequences * self.metadata.row_elements, reading_context()

        def opened(name: str, floats: bool) -> StoredArray:
            digest = self.metadata.digests[name]
            array = StoredArray(self.folder / name, length, context, digest=digest, floats=floats)
            array.check_files()
            return array

        self._ids, self._log_probabilities = opened(IDS, False), opened(LOG_PROBABILITIES, True)
        for array in (self._ids, self._log_probabilities):  # one of another teacher shows it there
            array.read(0, 1).result()

    def contents(self) -> dict[str, str]:
        """The folder and a digest of its arrays; see `lmlib.data.batch.Stored`."""
        of_arrays = json.dumps(dict(self.metadata.digests), sort_keys=True)
        return {shown(self.folder): digest(of_arrays.encode())}

    def read(self, sequence_B: np.ndarray) -> "Listed":
        """Starts reading what was said of each sequence; nothing was of sequence -1."""
        step = self.metadata.row_elements
        arrays = self._ids, self._log_probabilities
        coming = [
            None if start < 0 else [array.read(start, start + step) for array in arrays]
            for start in (sequence_B * step).tolist()
        ]
        return Listed(coming, self.metadata)


class Listed:
    """Ids and log-probabilities on their way from disk."""

    def __init__(self, coming: list[Any], metadata: TeacherMetadata) -> None:
        self._coming, self._metadata = coming, metadata

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids (int32) and log-probabilities (float16), both (b, s, k), zeros for sequence -1.

        Raises DamagedDataError for what cannot be read, or is no id of the teacher's.
        """
        shape = len(self._coming), self._metadata.row_elements
        ids, log_probabilities = np.zeros(shape, np.int32), np.zeros(shape, DTYPE)
        for row, pair in enumerate(self._coming):
            if pair is not None:
                ids[row], log_probabilities[row] = (reading.result() for reading in pair)
        if ids.size and not 0 <= ids.min() <= ids.max() < self._metadata.vocab_size:
            raise DamagedDataError(f"a stored teacher has ids from {ids.min()} to {ids.max()}")
        whole = len(ids), self._metadata.sequences.sequence_length, self._metadata.k
        return ids.reshape(whole), log_probabilities.reshape(whole)


def check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ValueError, which names the first difference, if a teacher saw other sequences."""
    for name, value in wanted.items():
        if found[name] != value:
            raise ValueError(
                f"the teacher in {folder} saw other sequences: it has {name} {found[name]!r}, and "
                f"this data {value!r}; give the same settings, or run python -m runner.teach "
                "for these into another folder"
            )


def _check_types(metadata: TeacherMetadata) -> None:
    sequences = metadata.sequences
    counts = metadata.vocab_size, metadata.k, sequences.sequences, sequences.sequence_length
    if not all(type(each) is int and 0 < each < 2**31 for each in counts):
        raise ValueError(f"its counts are {counts!r:.80}")
    if metadata.k > metadata.vocab_size or set(metadata.digests) != {IDS, LOG_PROBABILITIES}:
        raise ValueError(f"it lists {metadata.k} of {metadata.vocab_size} ids")
    texts = metadata.teacher, metadata.fingerprint, sequences.data, *metadata.digests.values()
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("it has no text for a name or a digest")
