"""Reads seqax's flat tokens as stored, without conversion.

A data set is a zarr v2 group whose splits `train` and `validation` hold `encoded_tokens`, uint32 `2
* id + begins_a_document`, and an attribute `max_token_id`. Their `seq_starts`, one number for each
document and one for the end, are compressed in a way that TensorStore cannot read; the lowest bit
of each token has the same information. The format: github.com/MatX-inc/seqax, docs/flat-tokens.md.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lmlib.data.stored.metadata import DamagedDataError, digest
from lmlib.data.stored.split import Arrays, StoredSplit
from lmlib.data.stored.token_arrays import StoredArray, reading_context
from lmlib.storage.stored_json import read_json

TOKENS, STARTS, ATTRIBUTES = "encoded_tokens", "seq_starts", ".zattrs"


class SeqaxArray(StoredArray):
    """An array as written by seqax: compressed chunks, one per file, without checksums."""

    description, files_folder = ".zarray", ""

    def spec(self) -> dict[str, Any]:
        return {"driver": "zarr", "kvstore": self.files()}

    def check_description(self, content: Any) -> None:
        compressor = content.get("compressor") if isinstance(content, dict) else content
        known = isinstance(compressor, dict) and compressor.get("id") == "blosc"
        if compressor is not None and not known:
            raise ValueError(f"its compressor is {compressor!r:.80}, not blosc")

    def least_bytes(self, file: int) -> int:
        return 0

    def _file_bytes(self, held: int | None = None) -> int:
        # Random data grows slightly when it is compressed.
        return 2 * self.chunk_length * self.dtype.itemsize + 1024


class SeqaxSplit(StoredSplit):
    """A split in seqax's format; reads like any split of documents without framing."""

    def __init__(self, folder: Path) -> None:
        """Raises DamagedDataError if an array or attribute is missing or unexpected."""
        self._folder, self.metadata = folder, None
        self.tokens = length_on_disk(folder / TOKENS, "<u4", at_least=0)
        self.documents = length_on_disk(folder / STARTS, "<u8", at_least=1) - 1
        self.max_token_id = _entry(folder / ATTRIBUTES, "max_token_id")
        if type(self.max_token_id) is not int or not 0 <= self.max_token_id < 2**31:
            raise _unexpected(folder / ATTRIBUTES, "max_token_id", self.max_token_id)
        self._encoded = SeqaxArray(folder / TOKENS, self.tokens, reading_context())
        self._encoded.check_files(some_lost=True)
        # Only the sizes are known, since the format has no digests.
        self.digest = digest(f"{self.tokens} {self.documents} {self.max_token_id}".encode())

    def read(self, start: int, stop: int) -> Callable[[], Arrays]:
        """See `StoredSplit.read`."""
        read = self._encoded.read(start, stop)

        def arrays() -> Arrays:
            encoded_N = read()
            begins_N = (encoded_N & 1).astype(bool)
            return encoded_N >> 1, begins_N, ~begins_N

        return arrays

    def edges(self, first: int = 0, stop: int | None = None) -> np.ndarray:
        """Raises ValueError, since finding them would require reading all tokens."""
        raise ValueError(
            f"{self._folder} is in seqax's format, whose document starts cannot be read: convert "
            "it with python -m data_tools.convert, or use packed=True without begin_with_documents"
        )


def length_on_disk(array: Path, dtype: str, at_least: int) -> int:
    """Returns the length of an array according to its description.

    Raises DamagedDataError if it is below `at_least`, or the dtype differs.
    """
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
