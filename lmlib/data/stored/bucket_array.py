"""Arrays of flat tokens in a bucket: each chunk is fetched once and cached on this machine."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from lmlib.data.stored.token_arrays import StoredArray
from lmlib.storage.bucket.chunk_cache import ChunkCache
from lmlib.storage.bucket.copies import url_of
from lmlib.storage.bucket.failures import BucketError, unreachable
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.local_folder import copies_folder


class BucketArray(StoredArray):
    """An array with its small files in the local copy of a bucket's folder and its chunks remote.

    Opening, reading and checking it raise BucketError if the bucket cannot be read.
    """

    def __init__(self, *arguments: Any) -> None:
        """See `open_array`."""
        super().__init__(*arguments)
        self._cache: ChunkCache | None = None
        if (digest := arguments[3]) is not None:
            chunk_bytes = self.chunk_length * self.dtype.itemsize
            self._cache = ChunkCache(copies_folder() / "chunks", digest, chunk_bytes)

    def files(self) -> dict[str, Any]:
        url = url_of(self.path)
        assert url is not None
        return url.key_value_store(f"{url.folder}/")

    def file_sizes(self) -> dict[str, int]:
        """Returns the minimum size of each file, since listing a bucket returns no sizes."""
        url = url_of(self.path / self.files_folder)
        assert url is not None
        names = [name for name in BucketStore(url).list() if name.isdecimal()]
        return {name: self.least_bytes(int(name)) for name in names}

    def coming(self, first: int, last: int) -> Callable[[], np.ndarray]:
        cache, chunk = self._cache, first // self.chunk_length
        if cache is None or first == last:
            return super().coming(first, last)
        dtype = self.dtype.newbyteorder("<")
        size = (last - first) * dtype.itemsize
        content = cache.read(chunk, size)
        if len(content) == size:
            kept = np.frombuffer(content, dtype)
            if not len(self.wrong_chunks(chunk, kept)):
                return lambda: kept
        arrived = super().coming(first, last)

        def arrived_and_kept() -> np.ndarray:
            values = arrived()
            cache.keep(chunk, np.ascontiguousarray(values, dtype).tobytes())
            return values

        return arrived_and_kept

    def _fail(self, what: str, error: Exception) -> NoReturn:
        if isinstance(error, BucketError):
            raise error
        if (known := unreachable(str(error))) is not None:  # the error may contain secrets
            raise BucketError(known[0], f"cannot read {url_of(self.path)}: {known[1]}") from None
        super()._fail(what, error)
