"""How a step gets into a bucket: each process sends chunks of its own, and process 0 the rest."""

import datetime
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lmlib.checkpoint import arrays as saved
from lmlib.checkpoint import notes as saved_notes
from lmlib.checkpoint.in_bucket.steps import MANIFEST, StepsInBucket
from lmlib.checkpoint.manifest import Manifest, SavedArray, SavedFile, digest_of, encode
from lmlib.checkpoint.processes import wait_for_all
from lmlib.storage.bucket.copies import REQUESTS
from lmlib.storage.bucket.store import BucketStore

CHUNK_BYTES = 32 << 20  # at most, where a shard can be cut so: the unit that goes in one request
_SENT = "digests_of_process_{}.json"  # from a process to process 0, until the manifest is written
_uploads = itertools.count()  # the same on every process

Chunk = tuple[str, np.ndarray]  # the name of a file of a step, and its elements


class Uploads:
    """Saves steps, one at a time, in threads of its own."""

    def __init__(
        self,
        directory: Path,
        steps: StepsInBucket,
        opening: str,
        remove_old: Callable[[Path], None],
        save_seconds: int,
    ):
        """Takes what `manager.open_manager` takes; process 0 has taken the `steps`."""
        self._directory, self._steps, self._opening = directory, steps, opening
        self._remove_old, self._seconds = remove_old, save_seconds
        self._pending: Future[None] | None = None
        self._newest = max((int(name) for name in steps.kept() if name.isdecimal()), default=None)

    def latest_step(self) -> int | None:
        """The newest step that is there, or that was begun."""
        return self._newest

    @property
    def is_deleted(self) -> bool:
        """Never: in a bucket there are no folders that could be."""
        return False

    def save(
        self,
        step: int,
        state: Mapping[str, jax.Array],
        notes: dict[str, Any],
        beforehand: Callable[[], None],
    ) -> None:
        """Begins to save; returns once what this process sends is copied."""
        chunks, descriptions = _copied(state)
        arrays = saved.saved_arrays(dict(state))
        bare = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in state.items()
        }
        number = next(_uploads)
        self._pending, self._newest = Future(), step

        def save(done: Future[None]) -> None:
            try:
                self._send(step, number, chunks, descriptions, notes, arrays, bare, beforehand)
            except BaseException as error:  # `wait_until_finished` raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=save, args=(self._pending,), name="upload", daemon=True).start()

    def wait_until_finished(self) -> None:
        """Returns when the step that was begun last is whole; raises what went wrong, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Nothing is open once it has been waited for."""

    def _send(
        self,
        step: int,
        number: int,
        chunks: list[Chunk],
        descriptions: dict[str, bytes],
        notes: dict[str, Any],
        arrays: dict[str, SavedArray],
        bare: dict[str, jax.ShapeDtypeStruct],
        beforehand: Callable[[], None],
    ) -> None:
        folder, first = f"{step}-{self._opening}-{number}", jax.process_index() == 0
        files = self._steps.files_in(folder)
        digests = _send_all(files, chunks)
        if not first:
            sent = json.dumps(digests).encode()
            files.write(_SENT.format(jax.process_index()), sent)
        wait_for_all(f"upload_sent_{number}", self._seconds)
        if first:
            texts = {**descriptions, f"{saved_notes.NOTES}/notes.json": json.dumps(notes).encode()}
            digests |= _send_all(files, list(texts.items()))
            for sent_by in _taken(files, range(1, jax.process_count())):
                digests |= sent_by
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            manifest = Manifest(step, now, None, arrays, digests)
            # What could not be restored is not saved.
            saved.check_layout(self._directory / str(step), manifest, bare, files)
            beforehand()
            files.write(MANIFEST, encode(manifest))
            self._steps.add(str(step), folder)
            self._remove_old(self._directory)
        wait_for_all(f"upload_whole_{number}", self._seconds)


def _send_all(files: BucketStore, contents: list[Any]) -> dict[str, SavedFile]:
    """Writes files in parallel; their sizes and digests."""

    def send(content: tuple[str, Any]) -> tuple[str, SavedFile]:
        name, values = content
        sent = values if isinstance(values, bytes) else values.tobytes()
        files.write(name, sent)
        return name, SavedFile(len(sent), digest_of(sent))

    with ThreadPoolExecutor(REQUESTS) as threads:
        return dict(threads.map(send, contents))


def _taken(files: BucketStore, processes: Iterable[int]) -> list[dict[str, SavedFile]]:
    """What each of `processes` sent, whose notes of that are deleted."""

    def take(process: int) -> dict[str, SavedFile]:
        name = _SENT.format(process)
        sent = json.loads(files.read(name))
        files.delete(name)
        return {file: SavedFile(*facts) for file, facts in sent.items()}

    with ThreadPoolExecutor(REQUESTS) as threads:  # of a thousand one after the other take a minute
        return list(threads.map(take, processes))


def _copied(state: Mapping[str, jax.Array]) -> tuple[list[Chunk], dict[str, bytes]]:
    """The chunks that this process sends of the arrays, and the `.zarray` of each of these."""
    words = {name: _words(array) for name, array in state.items()}
    for array in words.values():
        array.copy_to_host_async()
    chunks: list[Chunk] = []
    descriptions = {}
    for name, array in words.items():
        chunk = _chunk_shape(array.sharding.shard_shape(array.shape), array.dtype.itemsize)
        descriptions[f"{saved.STATE}/{name}/{saved.ZARRAY}"] = _zarray(array, chunk)
        for shard in array.addressable_shards:
            if shard.replica_id == 0:  # one of the devices that hold the same
                values = np.copy(shard.data)  # a copy: the array may be donated meanwhile
                for place, part in _cut(shard.index, values, chunk):
                    file = saved.chunk_name(place)
                    chunks.append((f"{saved.STATE}/{name}/{file}", part))
    return chunks, descriptions


def _words(array: jax.Array) -> jax.Array:
    """An array as it is stored: of typed PRNG keys, their words."""
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def _chunk_shape(shard: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Cuts a shard's shape, outer axes first, until a chunk has `CHUNK_BYTES` or no axis is left
    to cut; chunks divide shards."""
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
    """The chunks of a shard, which begins at `index`, and their places in the array's grid."""
    starts = [part.start or 0 for part in index]
    grid = [range(length // part) for length, part in zip(values.shape, chunk, strict=True)]
    for numbers in itertools.product(*grid):
        within = [slice(n * part, (n + 1) * part) for n, part in zip(numbers, chunk, strict=True)]
        place = tuple(
            start // part + n for start, part, n in zip(starts, chunk, numbers, strict=True)
        )
        yield place, np.asarray(values[tuple(within)])


def _zarray(array: jax.Array, chunk: tuple[int, ...]) -> bytes:
    """The description of an uncompressed array, as zarr's version 2 has it."""
    dtype = np.dtype(array.dtype)
    named = dtype.name if dtype.kind == "V" else dtype.str  # bfloat16 is none of NumPy's own
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
