"""How the arrays reach the disk, and the digests that each process makes of what it wrote."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from lmlib.checkpoint.arrays import STATE, ZARRAY, check_layout, saved_arrays
from lmlib.checkpoint.manifest import SavedFile, digests_of, write_manifest
from lmlib.checkpoint.processes import wait_for_all
from lmlib.storage.whole_file import write_whole

_SENT = "digests_of_process_{}.json"  # from a process to process 0, until the manifest is written

Digests = dict[str, SavedFile]

_saves = itertools.count()  # the same on every process


class ArraysHandler(ocp.PyTreeCheckpointHandler):
    """Writes arrays as Orbax does, then calls `written`, on every process.

    Its OCDBT format and compression are off: a save takes a fraction of the time without them,
    and trained weights hardly compress.
    """

    def __init__(self, written: Callable[[Path], None], seconds: int):
        """Makes a handler for `ArraysSave`.

        Args:
          written: gets the folder of the arrays once all processes have written all of theirs. It
            runs in a thread of Orbax's, and the save fails if it raises.
          seconds: how long the processes wait for each other.
        """
        super().__init__(use_ocdbt=False, use_compression=False)
        self._written = written
        self._seconds = seconds

    async def async_save(self, directory: Any, *args: Any, **more: Any) -> list[Any]:
        writes = await super().async_save(directory, *args, **more)
        folder, number = Path(directory), next(_saves)

        def then() -> None:
            wait_for_all(f"arrays_written_{number}", self._seconds)
            self._written(folder)

        return [_Written(writes or [], then)]


@ocp.args.register_with_handler(ArraysHandler, for_save=True)
@dataclasses.dataclass
class ArraysSave(ocp.args.PyTreeSave):
    """The arrays to save, by name."""


@ocp.args.register_with_handler(ArraysHandler, for_restore=True)
@dataclasses.dataclass
class ArraysRestore(ocp.args.PyTreeRestore):
    """Orbax asks for one of each handler; nothing is restored with it."""


@dataclasses.dataclass(frozen=True)
class _Written:
    """A future, as Orbax waits for it: the writes of this process, and `then` what follows."""

    writes: Sequence[Any]
    then: Callable[[], None]

    def result(self, timeout: float | None = None) -> None:
        for write in self.writes:
            write.result(timeout=timeout)
        self.then()


def around_the_manifest(
    folder: Path,
    step: int,
    arrays: dict[str, jax.Array],
    beforehand: Callable[[], None],
    check: Callable[[], None],
) -> tuple[Callable[[Path], None], Callable[[], None]]:
    """What every process does once the arrays of a step are written, and then process 0 alone.

    Args:
      folder: of the step while it is not whole.
      beforehand, check: as in `Checkpoints`; called before the step gets its name.
    """
    described = saved_arrays(arrays)
    bare = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in arrays.items()
    }

    def digest(arrays_folder: Path) -> None:
        send_digests(folder, digest_own_chunks(arrays_folder, bare))

    def finish() -> None:
        beforehand()
        manifest = write_manifest(folder, step, described, received_digests(folder))
        check_layout(folder, manifest, bare)  # what could not be restored is not saved
        check()

    return digest, finish


def digest_own_chunks(folder: Path, arrays: dict[str, jax.ShapeDtypeStruct]) -> Digests:
    """Syncs and reads the chunks that this process wrote; each chunk is one process's.

    Args:
      folder: of the arrays, all of them written.
      arrays: their shapes, dtypes and shardings.

    Returns:
      Sizes and digests of the files, by path relative to the step's folder.
    """
    own = []
    for name, array in arrays.items():
        chunk = json.loads((folder / name / ZARRAY).read_bytes())["chunks"]
        writers = _writers(array, chunk)
        files = [file.name for file in (folder / name).iterdir() if file.name != ZARRAY]
        own += [f"{name}/{file}" for file in files if writers(file) == jax.process_index()]
    return {f"{STATE}/{file}": saved for file, saved in digests_of(folder, own).items()}


def _writers(array: jax.ShapeDtypeStruct, chunk: Sequence[int]) -> Callable[[str], int]:
    """Which process wrote the chunk in a file of an array, whose chunks have the shape `chunk`.

    A chunk is a shard or, where several devices hold the same shard and Orbax lets them share the
    writing, a part of one: the first part is from the first of them, and so on.
    """
    holders: dict[tuple[int, ...], list[int]] = {}  # processes of a shard, by its first element
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        holders.setdefault(tuple(part.start or 0 for part in index), []).append(
            device.process_index
        )
    shard = array.sharding.shard_shape(array.shape)

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


def send_digests(folder: Path, files: Digests) -> None:
    """Leaves them in the step's folder, for process 0."""
    write_whole(folder / _SENT.format(jax.process_index()), json.dumps(files))


def received_digests(folder: Path) -> Digests:
    """What the processes have sent, once all of them have; the files are deleted."""
    files: Digests = {}
    for process in range(jax.process_count()):
        file = folder / _SENT.format(process)
        files |= {name: SavedFile(*saved) for name, saved in json.loads(file.read_bytes()).items()}
        file.unlink()
    return files
