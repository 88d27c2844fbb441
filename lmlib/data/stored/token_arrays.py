"""The arrays of flat tokens, opened for reading; docs/flat-tokens.md has their format.

A data set may be untrusted. TensorStore would follow links, and allocate chunks of any length. An
array is opened only if it has the documented layout, and its files are as large as it claims.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tensorstore as ts
import xxhash

from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import DamagedDataError, digest
from lmlib.storage.local_folder import in_bucket, shown
from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import check_no_link

CHUNK_DIGESTS = "chunk_digests"  # little-endian uint64, one for each chunk
INTEGERS = frozenset({"uint8", "uint16", "uint32", "uint64"})
_CACHE_BYTES = 64 * 1024 * 1024  # holds the indices of files in use, and recent chunks
_LARGEST_DESCRIPTION = 1 << 20  # bytes
_LARGEST_CHUNK = 1 << 28  # bytes; upper limit of a read's allocation
_LARGEST_FILE = 1 << 32  # bytes


def codecs(chunk_length: int | None = None) -> list[dict[str, Any]]:
    """Returns zarr's description of the layout of files; without a length, of any chunk length."""
    plain = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding: dict[str, Any] = {"codecs": plain, "index_codecs": plain, "index_location": "end"}
    if chunk_length is not None:
        sharding["chunk_shape"] = [chunk_length]
    return [{"name": "sharding_indexed", "configuration": sharding}]


def digests_of_chunks(values: np.ndarray, chunk_length: int) -> np.ndarray:
    """Returns the XXH3-64 (uint64) of each chunk of the little-endian values."""
    stored = np.ascontiguousarray(values, values.dtype.newbyteorder("<")).view(np.uint8)
    step = chunk_length * values.dtype.itemsize
    starts = range(0, len(stored), step)
    return np.array([xxhash.xxh3_64_intdigest(stored[i : i + step]) for i in starts], np.uint64)


def digest_of_array(array: Path) -> str:
    """Returns the digest of the array in the folder `array`: of zarr.json, then chunk_digests."""
    return digest((array / "zarr.json").read_bytes() + (array / CHUNK_DIGESTS).read_bytes())


def open_array(
    path: Path,
    length: int,
    context: ts.Context,
    digest: str | None = None,
    dtypes: Collection[str] = INTEGERS,
) -> "StoredArray":
    """Opens the array of `length` elements in the folder `path` or the bucket that it stands for.

    With a `digest`, it and all chunks that are read are checked. `dtypes` are allowed by name.

    Raises DamagedDataError if the array cannot be opened, or has another length or dtype.
    """
    if not in_bucket(path):
        return StoredArray(path, length, context, digest, dtypes)
    from lmlib.data.stored.bucket_array import BucketArray

    return BucketArray(path, length, context, digest, dtypes)


class StoredArray:
    """One array, opened for reading. Lengths are in elements."""

    description = "zarr.json"
    files_folder = "c"  # contains the files 0, 1, 2, …
    overhead = 4, 16, 4  # bytes of a chunk's checksum, and of a file's index: per chunk, and once

    def __init__(
        self,
        path: Path,
        length: int | None,
        context: ts.Context,
        digest: str | None = None,
        dtypes: Collection[str] = INTEGERS,
    ) -> None:
        """See `open_array`; without `length`, any length is accepted."""
        self.path = path
        self._chunk_digests: np.ndarray | None = None
        doing = "cannot be opened"
        try:
            check_no_link(path, path / self.description)
            self.check_description(read_json(path / self.description, _LARGEST_DESCRIPTION))
            spec = {
                **self.spec(),
                "fill_missing_data_reads": False,  # a missing chunk is an error
                "recheck_cached_data": "open",
                "recheck_cached_metadata": "open",
            }
            self._array = ts.open(spec, read=True, context=context).result()
            layout: Any = self._array.chunk_layout
            (self.length,) = self._array.shape
            self.chunk_length: int = layout.read_chunk.shape[0]
            self.file_length: int = layout.write_chunk.shape[0]
            self.dtype = np.dtype(self._array.dtype.numpy_dtype)
            chunk, file = self.chunk_length * self.dtype.itemsize, self._file_bytes()
            if chunk >= _LARGEST_CHUNK or file > _LARGEST_FILE:
                raise ValueError(f"it claims chunks of {chunk:,} bytes in files of {file:,}")
            if length not in (self.length, None):
                raise ValueError(
                    f"it has shape ({self.length},), but metadata.json promises ({length},)"
                )
            if (dtype := self._array.dtype.name) not in dtypes:
                raise ValueError(f"it holds {dtype!r:.40}, not {' or '.join(sorted(dtypes))}")
            if digest is not None:
                doing = "has been changed or swapped"
                self._chunk_digests = self._read_chunk_digests(digest)
        except (OSError, ValueError) as error:
            self._fail(doing, error)

    def spec(self) -> dict[str, Any]:
        """Returns TensorStore's specification; it refuses an array with another layout."""
        names = {"name": "default", "configuration": {"separator": "/"}}
        layout = {"chunk_key_encoding": names, "codecs": codecs()}
        return {"driver": "zarr3", "kvstore": self.files(), "metadata": layout}

    def check_description(self, content: Any) -> None:
        """Raises ValueError for a description that this library does not read."""

    def files(self) -> dict[str, Any]:
        """Returns TensorStore's specification of the location of the files."""
        return {"driver": "file", "path": f"{data_path(self.path)}/"}

    def least_bytes(self, file: int) -> int:
        """Returns the minimum size of file number `file` with every chunk that it should hold."""
        return self._file_bytes(min(self.file_length, self.length - file * self.file_length))

    def _file_bytes(self, held: int | None = None) -> int:
        """Returns the size of a file with the chunks of `held` elements; by default, of all."""
        chunks = -(-(self.file_length if held is None else held) // self.chunk_length)
        checksum, entry, index = self.overhead
        chunk = self.chunk_length * self.dtype.itemsize + checksum
        return chunks * chunk + self.file_length // self.chunk_length * entry + index

    def file_sizes(self) -> dict[str, int]:
        """Returns the bytes of each file.

        Raises ValueError for a link or a file that is too large.
        """
        folder = self.path / self.files_folder
        if not folder.is_dir():
            return {}
        check_no_link(folder)
        sizes = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                check_no_link(Path(entry))
                sizes[entry.name] = entry.stat().st_size
                if sizes[entry.name] > self._file_bytes() and entry.name.isdecimal():
                    raise ValueError(f"{entry.path} has {sizes[entry.name]:,} bytes, too many")
        return sizes

    def check_files(self, some_lost: bool = False) -> None:
        """Raises DamagedDataError unless all files exist, with all their chunks.

        With `some_lost`, files may be missing or truncated, since the caller lists damage file by
        file. The array must still not claim far more than its files could hold.
        """
        try:
            sizes, files = self.file_sizes(), -(-self.length // self.file_length)
            for number in range(0 if some_lost else files):
                file = self.path / self.files_folder / str(number)
                if file.name not in sizes:
                    raise ValueError(f"{file} is missing")
                if sizes[file.name] < self.least_bytes(number):
                    raise ValueError(f"{file} is too short")
            claimed, found = files and files * self.least_bytes(0), sum(sizes.values())
            if files > 4 * len(sizes) + 1_000 or claimed > 4 * found + (1 << 26):
                raise ValueError(
                    f"it claims {files:,} files with {self.length:,} elements, but has "
                    f"{len(sizes):,} with {found:,} bytes"
                )
        except (OSError, ValueError) as error:
            self._fail("cannot be read", error)

    def read(self, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Starts reading elements [start, stop); returns a function that waits for them.

        Raises DamagedDataError if they are out of range; the function, if they cannot be read.
        """
        if not 0 <= start <= stop <= self.length:
            raise DamagedDataError(
                f"{self.path} has {self.length} elements, but others say that it has some from "
                f"{start} to {stop}: the data set is damaged; make it again"
            )
        # Whole chunks are read, to check them; TensorStore decodes whole chunks anyway.
        chunk = self.chunk_length
        first = start // chunk * chunk
        last = min(-(-stop // chunk) * chunk, self.length) if start < stop else first
        arrived = self.coming(first, last)

        def elements() -> np.ndarray:
            try:
                return arrived()[start - first : stop - first]
            except (OSError, ValueError) as error:
                self._fail(f"cannot be read from {start} to {stop}", error)

        return elements

    def coming(self, first: int, last: int) -> Callable[[], np.ndarray]:
        """Like `read`, of whole chunks; the function raises OSError or ValueError for damage."""
        future = self._array[first:last].read()

        def arrived() -> np.ndarray:
            values = future.result()
            wrong = self.wrong_chunks(first // self.chunk_length, values)
            if len(wrong):
                raise ValueError(f"chunk {wrong[0]} is not the one that was written there")
            return values

        return arrived

    def wrong_chunks(self, chunk: int, values: np.ndarray) -> np.ndarray:
        """Returns the numbers of chunks, from `chunk` on, whose digests differ from `values`."""
        if self._chunk_digests is None:
            return np.zeros(0, np.int64)
        found = digests_of_chunks(values, self.chunk_length)
        return chunk + np.flatnonzero(found != self._chunk_digests[chunk : chunk + len(found)])

    def _read_chunk_digests(self, expected: str) -> np.ndarray:
        file, chunks = self.path / CHUNK_DIGESTS, -(-self.length // self.chunk_length)
        check_no_link(file)
        if file.stat().st_size != 8 * chunks:
            raise ValueError(f"{file} has {file.stat().st_size:,} bytes, not 8 for each chunk")
        if digest_of_array(self.path) != expected:
            raise ValueError("it is not the array that metadata.json was written for")
        return np.fromfile(file, "<u8").astype(np.uint64)

    def _fail(self, what: str, error: Exception) -> NoReturn:
        cause = str(error).partition(" [")[0]  # drop TensorStore's specification
        raise DamagedDataError(
            f"{shown(self.path)} {what}: the data set is damaged; make it again or restore the "
            f"file ({cause})"
        ) from error


def reading_context() -> ts.Context:
    """Returns a context that bounds the cache memory shared by all arrays opened with it."""
    retries = {"max_retries": 8, "initial_delay": "100ms", "max_delay": "10s"}  # of buckets
    limit = {"total_bytes_limit": _CACHE_BYTES}
    requests = {f"{kind}_request_retries": retries for kind in ("s3", "gcs")}
    return ts.Context({"cache_pool": limit, **requests})
