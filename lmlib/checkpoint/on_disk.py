"""Steps on a disk: Orbax writes the arrays, a rename makes a step visible.

Orbax's `AsyncCheckpointer` writes only the folder of the arrays. Its OCDBT format and compression
are off: saves are much faster without them, and trained weights hardly compress. Steps are restored
from their verified files, without Orbax.
"""

import dataclasses
import json
import logging
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from lmlib.checkpoint import folders
from lmlib.checkpoint.arrays import STATE, ZARRAY
from lmlib.checkpoint.failures import tensorstore_error_number
from lmlib.checkpoint.in_bucket.steps import MANIFEST
from lmlib.checkpoint.manifest import (
    Manifest,
    SavedArray,
    SavedFile,
    digests_of,
    encode,
    read_manifest,
    write_manifest,
)
from lmlib.storage.atomic_file import make_folder, sync, write_atomically
from lmlib.storage.store import FolderStore

_OPEN = Path("/proc/self/fd")  # Linux lists open files there by descriptor
_FOR_EVER = 3_000_000_000  # seconds; Orbax's limit uses the wall clock, which may be changed
_CLOSED = "Event loop is closed"
_OF_A_CHUNK = "async_serialize_from_host"


class StepsOnDisk:
    """The steps in a directory, for the run that writes them. The directory is held open.

    Steps have names such as `7` and `7.damaged`. All but process 0 call only `open`, `begin`,
    `is_deleted` and `close`.
    """

    def __init__(self, directory: Path, check: Callable[[], None], seconds: int):
        """Changes nothing; `seconds` limits how long processes wait for each other."""
        self._directory, self._check, self._seconds = directory, check, seconds
        self._descriptor = -1
        self._path = directory  # an alias that leads to the open directory under any name

    def take(self) -> None:
        """Makes this run the writer: creates the directory and removes unfinished steps."""
        make_folder(self._directory)
        folders.remove_unfinished(self._directory)

    def open(self) -> None:
        self.close()
        # The directory's own path may then hold any character: Orbax finds files by patterns and
        # takes gs:/ for a bucket, TensorStore takes a backslash for a slash, and both require
        # UTF-8. Also, TensorStore would recreate deleted or moved parent folders of a path.
        if _OPEN.is_dir():
            self._descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            self._path = _OPEN / str(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._path = -1, self._directory

    @property
    def is_deleted(self) -> bool:
        return self._descriptor >= 0 and os.fstat(self._descriptor).st_nlink == 0

    def begin(self, step: int, opening: str) -> "StepOnDisk":
        """Begins a step; no other run has the text `opening`."""
        if jax.process_count() == 1 and self.is_deleted:
            self._check()
            self._directory.mkdir(exist_ok=True)
            sync(self._directory.parent)
            self.open()
        os.stat(self._directory)  # fails if it was moved: no new one is made without its steps
        return StepOnDisk(self._path, step, opening, self._check, self._seconds)

    def complete(self) -> list[int]:
        """Returns the steps of all complete checkpoints, in order."""
        return folders.steps_in(self._path)  # of the open directory, even if it was replaced

    def remove(self, names: Iterable[str]) -> None:
        """Removes steps; a kill leaves no visible part of one."""
        folders.remove([self._path / name for name in names], self._check)

    def remove_unfinished(self) -> None:
        folders.remove_unfinished(self._directory)

    def set_aside(self, name: str, aside: str) -> None:
        """Renames a step; an earlier step with the new name is deleted."""
        self._check()
        if (self._directory / aside).exists():
            shutil.rmtree(self._directory / aside)
        (self._directory / name).rename(self._directory / aside)
        sync(self._directory)

    def rank(self, name: str, metric: float) -> None:
        """Sets `metric` in a step's manifest, atomically.

        A kill may leave an unfinished folder, but no other file in the step, which would be damage.
        """
        folder = self._directory / name
        content = encode(dataclasses.replace(read_manifest(folder), metric=metric))
        unfinished = self._directory / f"{name}{folders.UNFINISHED}-ranked"
        unfinished.mkdir()
        try:
            write_atomically(unfinished / MANIFEST, content)
            self._check()
            os.replace(unfinished / MANIFEST, folder / MANIFEST)
        finally:
            shutil.rmtree(unfinished)


class StepOnDisk:
    """A step that is being written. Its files already have their final names."""

    def __init__(
        self, directory: Path, step: int, opening: str, check: Callable[[], None], seconds: int
    ):
        """Creates the folder `<step>.orbax-checkpoint-tmp-<opening>` on process 0."""
        self._folder = directory / f"{step}{folders.UNFINISHED}-{opening}"
        self._final, self._step, self._check = directory / str(step), step, check
        if jax.process_index() == 0:
            self._folder.mkdir()
        self._limit = seconds if jax.process_count() > 1 else _FOR_EVER
        self.files = FolderStore(self._folder)

    def begin(self, state: Mapping[str, jax.Array]) -> Callable[[], dict[str, SavedFile]]:
        """Copies the arrays, and returns a function that writes this process's part of them.

        It is called on every process, in another thread, and returns the digests of its files.
        """
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
        """Makes the step visible, complete and durable."""
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
        corner = tuple(part.start or 0 for part in index)
        holders.setdefault(corner, []).append(device.process_index)
    shard = sharding.shard_shape(shape)

    def writer(file: str) -> int:
        # A PRNG key's words have one more axis than its shards, the last.
        place = [int(number) for number in file.split(".")][: len(shard)]
        firsts = [number * length for number, length in zip(place, chunk, strict=False)]
        inside = [first % length for first, length in zip(firsts, shard, strict=True)]
        corner = tuple(first - rest for first, rest in zip(firsts, inside, strict=True))
        part = sum(rest // length for rest, length in zip(inside, chunk, strict=False))
        return holders[corner][part % len(holders[corner])]

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
