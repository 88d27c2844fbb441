"""Reads the flat tokens of seqax, unchanged, as they lie on disk.

A data set is a zarr v2 group whose splits `train` and `validation` hold `encoded_tokens`, uint32
`2 * id + begins_a_document`, and an attribute `max_token_id`. Their `seq_starts`, one number for
each document and one for the end, are compressed in a way that TensorStore cannot read; the lowest
bit of each token says as much. The format: github.com/MatX-inc/seqax, docs/flat-tokens.md.
"""

from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.damage import DamagedDataError
from lmlib.data.stored.digests import digest
from lmlib.data.stored.split import Span
from lmlib.data.stored.token_arrays import Reading, StoredArray, reading_context
from lmlib.storage.stored_json import read_json

TOKENS, STARTS, ATTRIBUTES = "encoded_tokens", "seq_starts", ".zattrs"


def is_seqax_split(folder: Path) -> bool:
    """Whether `folder` holds a split in seqax's format."""
    return (folder / TOKENS / ".zarray").is_file()


class SeqaxSplit:
    """A split in seqax's format; it reads like a `StoredSplit` of documents without framing."""

    def __init__(self, folder: Path) -> None:
        """Raises DamagedDataError if an array or attribute is missing or not as expected."""
        self._folder = folder
        self.tokens = _length_on_disk(folder / TOKENS, "<u4", at_least=0)
        self.documents = _length_on_disk(folder / STARTS, "<u8", at_least=1) - 1
        self.max_token_id = _entry(folder / ATTRIBUTES, "max_token_id")
        if type(self.max_token_id) is not int or not 0 <= self.max_token_id < 2**31:
            raise _unexpected(folder / ATTRIBUTES, "max_token_id", self.max_token_id)
        self._encoded = StoredArray(folder / TOKENS, self.tokens, reading_context(), driver="zarr")
        self._encoded.check_claim()

    @property
    def digest(self) -> str:
        """A digest of the sizes. The format keeps no digest of its arrays."""
        return digest(f"{self.tokens} {self.documents} {self.max_token_id}".encode())

    def read(self, start: int, stop: int) -> Span:
        """Starts reading tokens [start, stop)."""
        return _EncodedSpan(self._encoded.read(start, stop))

    def document_bounds(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raises ValueError: it would take reading all tokens."""
        raise ValueError(
            f"{self._folder} is in seqax's format, whose document starts cannot be read one by "
            "one: convert it with python -m data_tools.convert, or use packed=True"
        )


class _EncodedSpan:
    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def result(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        encoded = self._reading.result()
        begins = (encoded & 1).astype(bool)
        return encoded >> 1, begins, ~begins


def _length_on_disk(array: Path, dtype: str, at_least: int) -> int:
    file = array / ".zarray"
    shape, found = _entry(file, "shape"), _entry(file, "dtype")
    if found != dtype:
        raise _unexpected(file, "dtype", found)
    match shape:
        case [int(length)] if at_least <= length < 2**62:
            return length
    raise _unexpected(file, "shape", shape)


def _entry(file: Path, name: str) -> Any:
    try:
        return read_json(file)[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedDataError(
            f"{file} has no readable entry {name!r} ({error!r}): the data set is damaged"
        ) from error


def _unexpected(file: Path, name: str, value: object) -> DamagedDataError:
    return DamagedDataError(
        f"{file} has {name} {value!r:.80}, which seqax never writes: the data set is damaged"
    )
