"""The zarr3 arrays of flat tokens: one-dimensional, checksummed, never read as zeros.

Sharding and crc32c are described in the zarr v3 specification (zarr-specs.readthedocs.io,
codecs `sharding_indexed` and `crc32c`).
"""

from pathlib import Path

import numpy as np
import tensorstore as ts

from lmlib.data.stored.array_layout import (
    ArrayLayout,
    check_claim,
    check_files,
    file_sizes,
    flat_tokens_layout,
    seqax_layout,
)
from lmlib.data.stored.damage import DamagedDataError
from lmlib.data.stored.data_path import file_store
from lmlib.data.stored.digests import digests_of_chunks, read_chunk_digests
from lmlib.storage.bucket.chunk_cache import ChunkCache
from lmlib.storage.bucket.copies import copies_folder, shown, url_of
from lmlib.storage.bucket.failures import BucketError, unreachable

CHUNK_LENGTH = 16 * 1024  # tokens; the unit of reading, and of checksums
FILE_LENGTH = 16 * 1024 * 1024  # tokens in one file, the unit of writing
INDEX_CHUNK_LENGTH = 1024  # the same for document_starts and first_documents
INDEX_FILE_LENGTH = 1024 * 1024
_CACHE_BYTES = 64 * 1024 * 1024  # holds the index of every file in use, and chunks lately read


def create_array(
    path: Path, dtype: type[np.number], *, chunk_length: int, file_length: int
) -> ts.TensorStore:
    """Makes an empty array of `dtype`, in place of what may be there.

    `file_length` must be a multiple of `chunk_length`.
    """
    checksummed_bytes = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "crc32c"},
    ]
    sharding = {
        "chunk_shape": [chunk_length],
        "codecs": checksummed_bytes,
        "index_codecs": checksummed_bytes,
        "index_location": "end",
    }
    grid = {"name": "regular", "configuration": {"chunk_shape": [file_length]}}
    spec = {
        "driver": "zarr3",
        "kvstore": file_store(path),
        "metadata": {
            "shape": [0],
            "data_type": np.dtype(dtype).name,
            "chunk_grid": grid,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
        # Zeros are stored like anything else, so that an absent chunk is always a lost one.
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, create=True, delete_existing=True).result()


def open_for_appending(path: Path, length: int) -> ts.TensorStore:
    """Opens an array that a writer left, cut or stretched to `length` elements.

    Raises OSError or ValueError if it is not laid out as `create_array` does.
    """
    file_sizes(flat_tokens_layout(path))
    spec = {"driver": "zarr3", "kvstore": file_store(path), "store_data_equal_to_fill_value": True}
    array = ts.open(spec, open=True).result()
    return array.resize(exclusive_max=[length], resize_metadata_only=True).result()


def append(path: Path, array: ts.TensorStore, values: np.ndarray) -> ts.TensorStore:
    """Stores `values` after what `array`, at `path`, holds and returns the longer array.

    All appends but the last must be whole files, or files would be read back and rewritten.
    Raises OSError if that fails.
    """
    start, stop = array.shape[0], array.shape[0] + len(values)
    try:
        array = array.resize(exclusive_max=[stop], resize_metadata_only=True).result()
        array[start:stop].write(values).result()
    except ValueError as error:  # TensorStore's only kind of error
        raise OSError(
            f"{path} cannot be written: {error}; what was written before "
            "is kept: free space or repair access, and run the same command again"
        ) from error
    return array


class StoredArray:
    """One array on disk, opened for reading."""

    def __init__(
        self,
        path: Path,
        length: int,
        context: ts.Context,
        driver: str = "zarr3",
        digest: str | None = None,
        floats: bool = False,
    ) -> None:
        """Raises DamagedDataError if the array cannot be opened or is not `length` long.

        `driver` is TensorStore's name for the array's format: "zarr3", or "zarr" for seqax's.
        With the array's `digest`, it and all chunks that are read are checked. `floats`: whether
        its elements are float16, and no unsigned integers.
        """
        self.path, self.length = path, length
        self._url = url_of(path)
        self._cache: ChunkCache | None = None
        try:
            layout = flat_tokens_layout(path) if driver == "zarr3" else seqax_layout(path)
        except (OSError, ValueError) as error:
            raise self._damaged("cannot be opened", error) from error
        if layout.length != length:
            raise DamagedDataError(
                f"{path} has shape ({layout.length},), but metadata.json promises ({length},): "
                "the data set is damaged; make it again"
            )
        if layout.has_floats != floats:
            what = "floats, and integers" if layout.has_floats else "integers, and floats"
            raise DamagedDataError(
                f"{path} holds {what} belong there: the data set is damaged; make it again"
            )
        self.layout: ArrayLayout = layout
        self.chunk_length: int = layout.chunk_length
        self._chunk_digests: np.ndarray | None = None
        if digest is not None:
            try:
                chunks = -(-length // layout.chunk_length)
                self._chunk_digests = read_chunk_digests(path, chunks, digest)
            except (OSError, ValueError) as error:
                raise self._damaged("has been changed or swapped", error) from error
            if self._url is not None:
                folder = copies_folder() / "chunks"
                self._cache = ChunkCache(folder, digest, self._are_sound, self.chunk_length)
        spec = {
            "driver": driver,
            "kvstore": file_store(path),
            "fill_missing_data_reads": False,  # a deleted chunk is an error
            "recheck_cached_data": "open",
            "recheck_cached_metadata": "open",
        }
        try:
            self._array = ts.open(spec, read=True, context=context).result()
        except ValueError as error:
            self._raise_of_bucket(error)
            raise self._damaged("cannot be opened", error) from error

    def check_claim(self) -> None:
        """Raises DamagedDataError for links, and if most of an array so long is not there."""
        try:
            check_claim(self.layout, file_sizes(self.layout))
        except BucketError:
            raise
        except (OSError, ValueError) as error:
            raise self._damaged("cannot be read", error) from error

    def check_files(self) -> None:
        """Raises DamagedDataError unless the files are there that an array so long has."""
        try:
            check_files(self.layout)
        except BucketError:
            raise
        except (OSError, ValueError) as error:
            raise self._damaged("cannot be read", error) from error

    def read(self, start: int, stop: int) -> "Reading":
        """Starts reading elements [start, stop)."""
        return Reading(self, start, stop)

    def _cached(self, first: int, last: int) -> np.ndarray | None:
        """Whole chunks from element `first` to `last`, if this machine keeps all of them."""
        if self._cache is None or first == last:
            return None
        chunks = range(first, last, self.chunk_length)
        lengths = [min(self.chunk_length, last - start) for start in chunks]
        dtype = np.dtype(self._array.dtype.numpy_dtype).newbyteorder("<")
        return self._cache.read(first // self.chunk_length, lengths, dtype)

    def _check_chunks(self, values: np.ndarray, first: int) -> None:
        """Raises ValueError unless `values` are the whole chunks from element `first` on."""
        if self._chunk_digests is None:
            return
        wrong = self._wrong(first // self.chunk_length, values)
        if len(wrong):
            raise ValueError(f"chunk {wrong[0]} is not the one that was written there")

    def _are_sound(self, chunk: int, values: np.ndarray) -> bool:
        return len(self._wrong(chunk, values)) == 0

    def _wrong(self, chunk: int, values: np.ndarray) -> np.ndarray:
        """The numbers of those of the chunks from `chunk` on that `values` are not."""
        assert self._chunk_digests is not None
        found = digests_of_chunks(values, self.chunk_length)
        return chunk + np.flatnonzero(found != self._chunk_digests[chunk : chunk + len(found)])

    def _keep(self, values: np.ndarray, first: int) -> None:
        if self._cache is not None and len(values):
            self._cache.keep(first // self.chunk_length, values)

    def _raise_of_bucket(self, error: Exception) -> None:
        """Raises BucketError if it is a bucket, and no damage, that `error` of TensorStore's tells
        of."""
        if self._url is not None and (known := unreachable(str(error))) is not None:
            code, cause = known
            raise BucketError(code, f"cannot read {self._url}: {cause}") from None

    def _damaged(self, what: str, error: Exception) -> DamagedDataError:
        cause = str(error).partition(" [")[0]  # TensorStore appends its whole specification
        return DamagedDataError(
            f"{shown(self.path)} {what}: the data set is damaged; make it again or restore the "
            f"file ({cause})"
        )


class Reading:
    """Elements on their way from disk."""

    def __init__(self, stored: StoredArray, start: int, stop: int) -> None:
        self._stored, self._start, self._stop = stored, start, stop
        if not 0 <= start <= stop <= stored.length:
            raise DamagedDataError(
                f"{stored.path} has {stored.length} elements, but others say that it has some from "
                f"{start} to {stop}: the data set is damaged; make it again"
            )
        # Whole chunks, so that they can be checked; they are read and decoded whole anyway.
        length = stored.chunk_length
        self._first = start // length * length
        self._cached = stored._cached(self._first, self._last())
        if self._cached is None:
            self._future = stored._array[self._first : self._last()].read()

    def result(self) -> np.ndarray:
        """The elements, once they have arrived; raises DamagedDataError if they cannot be."""
        try:
            values = self._cached
            if values is None:
                values = self._future.result()
                self._stored._check_chunks(values, self._first)
                self._stored._keep(values, self._first)
        except ValueError as error:
            self._stored._raise_of_bucket(error)
            what = f"cannot be read from {self._start} to {self._stop}"
            raise self._stored._damaged(what, error) from error
        return values[self._start - self._first : self._stop - self._first]

    def _last(self) -> int:
        if self._start == self._stop:
            return self._first
        length = self._stored.chunk_length
        return min(-(-self._stop // length) * length, self._stored.length)


def reading_context() -> ts.Context:
    """Bounds the memory that all arrays opened with it may keep cached."""
    retries = {"max_retries": 8, "initial_delay": "100ms", "max_delay": "10s"}  # of buckets
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": _CACHE_BYTES},
            "s3_request_retries": retries,
            "gcs_request_retries": retries,
        }
    )
