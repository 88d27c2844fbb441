"""Steps on a disk: Orbax writes the arrays, a rename makes a step visible.

Orbax's `AsyncCheckpointer` writes only the folder of the arrays. Its OCDBT format and compression
are off: saves are much faster without them, and trained weights hardly compress. Steps are restored
from their verified files, without Orbax.
"""

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from lmlib.checkpoint.arrays import STATE, ZARRAY
from lmlib.checkpoint.failures import tensorstore_error_number
from lmlib.checkpoint.folders import unfinished_folder
from lmlib.checkpoint.manifest import Manifest, SavedArray, SavedFile, digests_of, write_manifest
from lmlib.storage.atomic_file import sync, write_atomically
from lmlib.storage.folder_store import FolderStore

_OPEN = Path("/proc/self/fd")  # Linux lists open files there by descriptor
_FOR_EVER = 3_000_000_000  # seconds; Orbax's limit uses the wall clock, which may be changed
_CLOSED = "Event loop is closed"
_OF_A_CHUNK = "async_serialize_from_host"


class OpenDirectory:
    """A directory that is held open.

    Attributes:
      path: an alias that leads to the open directory under any name.
    """

    def __init__(self, directory: Path):
        self.path, self._descriptor = directory, -1
        # The directory's own path may then hold any character: Orbax finds files by patterns and
        # takes gs:/ for a bucket, TensorStore takes a backslash for a slash, and both require
        # UTF-8. Also, TensorStore would recreate deleted or moved parent folders of a path.
        if _OPEN.is_dir():
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            self.path = _OPEN / str(self._descriptor)

    @property
    def is_deleted(self) -> bool:
        """True if it was deleted since, and not moved, as far as can be known."""
        return self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class StepOnDisk:
    """See `UnfinishedStep`."""

    def __init__(
        self, directory: Path, step: int, opening: str, check: Callable[[], None], seconds: int
    ):
        """Creates the folder `<step>.orbax-checkpoint-tmp-<opening>` on process 0.

        Args:
          check: called immediately before the step is renamed.
          seconds: limit on how long processes wait for each other.
        """
        self._folder = unfinished_folder(directory, step, opening)
        self._final, self._step, self._check = directory / str(step), step, check
        if jax.process_index() == 0:
            self._folder.mkdir()
        self._limit = seconds if jax.process_count() > 1 else _FOR_EVER
        self.files = FolderStore(self._folder)

    def begin(self, state: Mapping[str, jax.Array]) -> Callable[[], dict[str, SavedFile]]:
        checkpointer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False),
            async_options=ocp.AsyncOptions(
                timeout_secs=self._limit,
                # Otherwise Orbax waits five minutes for a folder that cannot be made.
                create_directories_asynchronously=False,
            ),
        )
        checkpointer.save(self._folder / STATE, args=ocp.args.PyTreeSave(dict(state)))
        layouts = {name: (array.sharding, array.shape) for name, array in state.items()}

        def written() -> dict[str, SavedFile]:
            checkpointer.close()  # waits until all processes have written
            return digests_of(self._folder, _own_chunks(self._folder, layouts))

        return written

    def write(self, name: str, content: bytes) -> None:
        (self._folder / name).parent.mkdir(exist_ok=True)
        write_atomically(self._folder / name, content)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink()

    def write_manifest(
        self, arrays: dict[str, SavedArray], digests: dict[str, SavedFile]
    ) -> Manifest:
        return write_manifest(self._folder, self._step, arrays, digests)

    def publish(self) -> None:
        self._check()
        self._folder.rename(self._final)
        sync(self._final.parent)


def _own_chunks(folder: Path, layouts: Mapping[str, tuple[Any, tuple[int, ...]]]) -> list[str]:
    """Returns the files of the chunks written by this process; each chunk has one writer."""
    own = []
    for name, (sharding, shape) in layouts.items():
        place = folder / STATE / name
        chunk = json.loads((place / ZARRAY).read_bytes())["chunks"]
        writer = _writers(sharding, shape, chunk)
        files = [file.name for file in place.iterdir() if file.name != ZARRAY]
        own += [f"{STATE}/{name}/{file}" for file in files if writer(file) == jax.process_index()]
    return own


def _writers(sharding: Any, shape: tuple[int, ...], chunk: Sequence[int]) -> Callable[[str], int]:
    """Returns a function from an array's chunk file to the process that wrote it.

    The chunks have the shape `chunk`. A chunk is a shard; or, if several devices hold the same
    shard and Orbax lets them share the writing, a part of one: the first part is written by the
    first device, and so on.
    """
    holders: dict[tuple[int, ...], list[int]] = {}  # processes of a shard, by its first element
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(tuple(part.start or 0 for part in index), []).append(
            device.process_index
        )
    shard = sharding.shard_shape(shape)

    def writer(file: str) -> int:
        place = [int(number) for number in file.split(".")][: len(shard)]
        firsts = [number * length for number, length in zip(place, chunk, strict=False)]
        corner = tuple(
            first // length * length for first, length in zip(firsts, shard, strict=True)
        )
        part = sum(
            (first - start) // length
            for first, start, length in zip(firsts, corner, chunk, strict=False)
        )
        processes = holders[corner]
        return processes[part % len(processes)]

    return writer


class OrbaxNoise(logging.Filter):
    """Drops log lines of Orbax and TensorStore about saves; `Checkpoints` raises the errors.

    Under `absl.app.run` there are some forty lines per save, and a hundred per failed save. After a
    failure, TensorStore's threads also call an event loop that Orbax has closed, with a traceback
    for each array, and asyncio reports errors of other chunks. That may be much later, so the
    filter stays installed.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != "asyncio":
            return "orbax" not in record.pathname
        error = record.exc_info[1] if record.exc_info else None
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        of_tensorstore = not frames and tensorstore_error_number(str(error)) is not None
        through_orbax = any("orbax" in frame.filename for frame in frames)
        return not (through_orbax or of_tensorstore or _CLOSED in str(error))


def silence() -> None:
    """Installs the filters; further calls change nothing."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(each, OrbaxNoise) for each in logger.filters):
            logger.addFilter(OrbaxNoise())
    if not isinstance(sys.unraisablehook, _Quiet):
        sys.unraisablehook = _Quiet(sys.unraisablehook)
    # After a failed save, for the remaining chunks.
    warnings.filterwarnings("ignore", f"coroutine '{_OF_A_CHUNK}", RuntimeWarning)


class _Quiet:
    """An `unraisablehook` that drops calls on a closed event loop and passes on everything else."""

    def __init__(self, hook: Callable[["sys.UnraisableHookArgs"], object]):
        self._hook = hook

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != _CLOSED:
            self._hook(unraisable)
