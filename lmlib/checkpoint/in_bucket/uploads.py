"""Uploads a step to a bucket: each process sends its own chunks, and process 0 the rest."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from lmlib.checkpoint import arrays as saved
from lmlib.checkpoint.in_bucket.steps import MANIFEST, StepsInBucket
from lmlib.checkpoint.manifest import Manifest, SavedArray, SavedFile, digest_of, encode, utc_now
from lmlib.storage.bucket.store import REQUESTS, BucketStore

CHUNK_BYTES = 32 << 20  # upper limit of a request, if the shard can be cut
_uploads = itertools.count()  # the same on every process

Chunk = tuple[str, np.ndarray]  # file name and elements


class WrittenStepsInBucket(StepsInBucket):
    """See `StepsOnDisk`. A bucket's directory is always there."""

    is_deleted = False

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def begin(self, step: int, opening: str) -> "StepInBucket":
        return StepInBucket(self, step, opening)

    def complete(self) -> list[int]:
        names = [name for name in self.kept() if name.isdecimal()]
        return sorted(int(name) for name in names if name == str(int(name)))


class StepInBucket:
    """See `StepOnDisk`."""

    def __init__(self, steps: StepsInBucket, step: int, opening: str):
        """Creates nothing; process 0 must own the `steps`."""
        self._steps, self._step = steps, step
        self._folder = f"{step}-{opening}-{next(_uploads)}"
        self.files = steps.files_in(self._folder)
        self.write, self.delete = self.files.write, self.files.delete

    def begin(self, state: Mapping[str, jax.Array]) -> Callable[[], dict[str, SavedFile]]:
        chunks, descriptions = _copied(state)

        def written() -> dict[str, SavedFile]:
            digests = _send_all(self.files, chunks)
            if jax.process_index() == 0:
                digests |= _send_all(self.files, [*descriptions.items()])
            return digests

        return written

    def write_manifest(
        self, arrays: dict[str, SavedArray], digests: dict[str, SavedFile]
    ) -> Manifest:
        manifest = Manifest(self._step, utc_now(), None, arrays, digests)
        self.write(MANIFEST, encode(manifest))
        return manifest

    def publish(self) -> None:
        self._steps.add(str(self._step), self._folder)


def _send_all(files: BucketStore, contents: list[Any]) -> dict[str, SavedFile]:
    """Writes files in parallel; returns their sizes and digests."""

    def send(content: tuple[str, Any]) -> tuple[str, SavedFile]:
        name, values = content
        sent = values if isinstance(values, bytes) else values.tobytes()
        files.write(name, sent)
        return name, SavedFile(len(sent), digest_of(sent))

    with ThreadPoolExecutor(REQUESTS) as threads:
        return dict(threads.map(send, contents))


def _copied(state: Mapping[str, jax.Array]) -> tuple[list[Chunk], dict[str, bytes]]:
    """Returns the chunks that this process sends, and the `.zarray` of their arrays."""
    words = {name: _words(array) for name, array in state.items()}
    for array in words.values():
        array.copy_to_host_async()
    chunks: list[Chunk] = []
    descriptions = {}
    for name, array in words.items():
        chunk = _chunk_shape(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
        descriptions[f"{saved.STATE}/{name}/{saved.ZARRAY}"] = _zarray(array, chunk)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:  # only one of the replicas
                values = np.copy(shard.data)  # copied, since the array may be donated
                for place, part in _cut(shard.index, values, chunk):
                    file = saved.chunk_name(place)
                    chunks.append((f"{saved.STATE}/{name}/{file}", part))
    return chunks, descriptions


def _words(array: jax.Array) -> jax.Array:
    """Returns an array as it is stored: typed PRNG keys become their words."""
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _chunk_shape(shard: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Splits a shard's shape, outer axes first, until a chunk fits `CHUNK_BYTES`.

    Stops when no axis can be split further. Chunks divide shards evenly.
    """
    chunk = list(shard)
    for axis, length in enumerate(shard):
        excess = math.prod(chunk) * element_bytes / CHUNK_BYTES
        if excess <= 1:
            break
        parts = (n for n in range(math.ceil(excess), length + 1) if length % n == 0)
        chunk[axis] = length // next(parts, length)
    return tuple(chunk)


def _cut(
    index: tuple[slice, ...], values: np.ndarray, chunk: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yields the chunks of a shard at `index`, with their positions in the array's grid."""
    starts = [part.start or 0 for part in index]
    grid = [range(length // part) for length, part in zip(values.shape, chunk, strict=True)]
    for numbers in itertools.product(*grid):
        within = [slice(n * part, (n + 1) * part) for n, part in zip(numbers, chunk, strict=True)]
        place = tuple(
            start // part + n for start, part, n in zip(starts, chunk, numbers, strict=True)
        )
        yield place, np.asarray(values[tuple(within)])


def _zarray(array: jax.Array, chunk: tuple[int, ...]) -> bytes:
    """Returns the zarr v2 description of an uncompressed array."""
    dtype = np.dtype(array.dtype)
    named = dtype.name if dtype.kind == "V" else dtype.str  # bfloat16 is not a NumPy dtype
    described = {
        "zarr_format": 2,
        "shape": list(array.shape),
        "chunks": list(chunk),
        "dtype": named,
        "compressor": None,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "dimension_separator": ".",
    }
    return json.dumps(described, indent=1).encode()
