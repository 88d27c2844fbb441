"""Digests that tie the arrays of a shard, and every chunk of them, to its metadata.json.

A file that lies where another belongs has sound checksums. So each array has a file `chunk_digests`
with the XXH3-64 of every chunk, and metadata.json has the XXH3-128 of that file and of `zarr.json`.
"""

from pathlib import Path

import numpy as np
import xxhash

CHUNK_DIGESTS = "chunk_digests"  # little-endian uint64, one for each chunk


def digest(content: bytes) -> str:
    """The XXH3-128 of `content`, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def digests_of_chunks(values: np.ndarray, chunk_length: int) -> np.ndarray:
    """The XXH3-64 (uint64) of each `chunk_length` of the values, little-endian; the last is cut."""
    stored = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8)
    step = chunk_length * values.dtype.itemsize
    starts = range(0, len(stored), step)
    return np.array([xxhash.xxh3_64_intdigest(stored[i : i + step]) for i in starts], np.uint64)


def digest_of_array(array: Path) -> str:
    """The digest of the array in the folder `array`: of its zarr.json, then its chunk_digests."""
    return digest((array / "zarr.json").read_bytes() + (array / CHUNK_DIGESTS).read_bytes())


def read_chunk_digests(array: Path, chunks: int, expected: str) -> np.ndarray:
    """The digests (uint64) of the array's `chunks`.

    Raises OSError or ValueError, which says why, if they are not there or the array has another
    digest than `expected`. Its zarr.json must be known to be no larger than it should.
    """
    file = array / CHUNK_DIGESTS
    if file.is_symlink():
        raise ValueError(f"{file} is a link: put what it leads to in its place")
    if file.stat().st_size != 8 * chunks:
        raise ValueError(f"{file} has {file.stat().st_size:,} bytes, not 8 for each chunk")
    if digest_of_array(array) != expected:
        raise ValueError("it is not the array that metadata.json was written for")
    return np.fromfile(file, "<u8").astype(np.uint64)
