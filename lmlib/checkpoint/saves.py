"""Saving a step, on a disk or in a bucket.

Each process writes the arrays that its devices hold, and leaves a list of digests for process 0.
Process 0 writes the manifest and makes the step visible.
"""

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from lmlib.checkpoint.arrays import check_layout, saved_arrays
from lmlib.checkpoint.manifest import Manifest, SavedArray, SavedFile, digest_of
from lmlib.checkpoint.notes import NOTES_FILE
from lmlib.checkpoint.processes import wait_for_all
from lmlib.storage.bucket.store import REQUESTS
from lmlib.storage.store import Store

Digests = dict[str, SavedFile]  # by file name

_SENT = "digests_of_process_{}.json"  # sent to process 0, until the manifest is written
_saves = itertools.count()  # the same on every process


@runtime_checkable
class UnfinishedStep(Protocol):
    """A step that is being written. Its files already have their final names."""

    @property
    def files(self) -> Store:
        """The files written so far."""

    def begin(self, state: Mapping[str, jax.Array]) -> Callable[[], Digests]:
        """Copies the arrays, and returns a function that writes this process's part of them.

        The function is called on every process, in another thread.
        """

    def write(self, name: str, content: bytes) -> None:
        """Writes a file that holds no array."""

    def delete(self, name: str) -> None:
        """Deletes a file that was written by `write`."""

    def write_manifest(self, arrays: dict[str, SavedArray], digests: Digests) -> Manifest:
        """Writes the manifest; `digests` covers all files written by `begin` and `write`."""

    def publish(self) -> None:
        """Makes the step visible, complete and durable."""


def begin_save(
    step: UnfinishedStep,
    folder: Path,
    state: Mapping[str, jax.Array],
    notes: dict[str, Any],
    beforehand: Callable[[], None],
    afterwards: Callable[[], None],
    seconds: int,
) -> Future[None]:
    """Saves arrays by name, in a thread; returns once they are copied.

    Args:
      folder: the step's folder, once it is visible.
      beforehand, afterwards: called on process 0 before and after the step becomes visible.
      seconds: limit on how long processes wait for each other.
    """
    arrays, number, saved = saved_arrays(dict(state)), next(_saves), Future[None]()
    bare = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in state.items()}
    written = step.begin(state)

    def finish() -> None:
        digests, process = written(), jax.process_index()
        if process != 0:
            step.write(_SENT.format(process), json.dumps(digests).encode())
        wait_for_all(f"arrays_written_{number}", seconds)
        if process == 0:
            for sent in _taken(step, range(1, jax.process_count())):
                digests |= sent
            content = json.dumps(notes).encode()
            step.write(NOTES_FILE, content)
            digests[NOTES_FILE] = SavedFile(len(content), digest_of(content))
            beforehand()
            manifest = step.write_manifest(arrays, digests)
            check_layout(folder, manifest, bare, step.files)  # what cannot be restored is not saved
            step.publish()
            afterwards()
        wait_for_all(f"step_whole_{number}", seconds)

    def run() -> None:
        try:
            finish()
        except BaseException as error:
            saved.set_exception(error)
        else:
            saved.set_result(None)

    threading.Thread(target=run, name="save", daemon=True).start()
    return saved


def _taken(step: UnfinishedStep, processes: Iterable[int]) -> list[Digests]:
    """Reads and deletes the digests that each of `processes` has left."""

    def take(process: int) -> Digests:
        name = _SENT.format(process)
        sent = json.loads(step.files.read(name))
        step.delete(name)
        return {file: SavedFile(*facts) for file, facts in sent.items()}

    with ThreadPoolExecutor(REQUESTS) as threads:  # a thousand sequential requests take a minute
        return list(threads.map(take, processes))
