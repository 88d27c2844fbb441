"""Reads Megatron's indexed data sets: PREFIX.bin has the tokens, PREFIX.idx where sequences begin.

The index has these parts, little-endian: `MMIDIDX\\0\\0`; the version, uint64, 1; the code of the
tokens' dtype, uint8; the numbers of sequences and of entries of documents, uint64; the tokens of
each sequence, int32; the byte at which it begins, int64; and the first sequence of each document,
int64, with one entry more for the end. Multimodal data sets have a further part.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from lmlib.data.stored.metadata import DamagedDataError

_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("entries", "<u8")]
)
_SCANNED = 1 << 24  # tokens at once


def megatron_prefix(path: Path) -> Path | None:
    """Returns the path without .bin or .idx; None if no such pair of files exists."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    files = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
    return prefix if all(file.is_file() for file in files) else None


class MegatronSplit:
    """The documents of a data set. `tokens` and `documents` are their numbers."""

    def __init__(self, prefix: Path) -> None:
        """Reads all tokens for the largest.

        Raises DamagedDataError if the files are damaged or don't fit each other, ValueError for
        numbers that are not tokens.
        """
        self._bin, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        content = (
            np.memmap(index, np.uint8, mode="r") if index.stat().st_size else np.zeros(0, "u1")
        )
        if len(content) < _HEADER.itemsize or content[:9].tobytes() != _MAGIC:
            raise DamagedDataError(f"{index} does not begin like an index of Megatron's")
        (header,) = content[: _HEADER.itemsize].view(_HEADER)
        if header["version"] != 1 or header["dtype"] not in _DTYPES:
            raise ValueError(
                f"{index} has version {header['version']} and tokens of type {header['dtype']}: "
                "only version 1 with integers is read"
            )
        token = np.dtype(_DTYPES[int(header["dtype"])])
        sequences, entries = int(header["sequences"]), int(header["entries"])
        parts = np.cumsum([_HEADER.itemsize, 4 * sequences, 8 * sequences, 8 * entries])
        if parts[-1] > len(content) or entries < 1:
            raise DamagedDataError(f"{index} is truncated: copy or make it again")
        lengths, pointers, firsts = (
            content[begin:end].view(dtype)
            for (begin, end), dtype in zip(pairwise(parts), ("<i4", "<i8", "<i8"), strict=True)
        )
        begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        in_order = firsts[0] == 0 and firsts[-1] == sequences and (np.diff(firsts) >= 0).all()
        if not in_order or (lengths < 0).any() or (pointers != begins[:-1] * token.itemsize).any():
            raise DamagedDataError(f"{index} is damaged: its sequences are not in order")
        self._starts = begins[firsts]  # of each document, and the end
        self.tokens, self.documents = int(begins[-1]), entries - 1
        size = self._bin.stat().st_size
        if size != self.tokens * token.itemsize:
            raise DamagedDataError(
                f"{self._bin} has {size:,} bytes, and {index.name} promises "
                f"{self.tokens * token.itemsize:,}: copy or make it again"
            )
        self._ids = np.memmap(self._bin, token, mode="r") if size else np.zeros(0, token)
        self.max_token_id = 0
        for start in range(0, self.tokens, _SCANNED):
            piece = self._ids[start : start + _SCANNED]
            if piece.min() < 0 or piece.max() >= 2**31:
                raise ValueError(f"{self._bin} has ids outside of [0, 2**31) after token {start:,}")
            self.max_token_id = max(self.max_token_id, int(piece.max()))

    def read(self, start: int, stop: int) -> Callable[[], tuple[np.ndarray, np.ndarray, None]]:
        """Returns a function that reads tokens [start, stop), and where documents begin."""

        def arrays() -> tuple[np.ndarray, np.ndarray, None]:
            begins = np.zeros(stop - start, bool)
            low, high = np.searchsorted(self._starts, [start, stop])
            begins[self._starts[low:high] - start] = True
            return np.asarray(self._ids[start:stop]), begins, None

        return arrays
