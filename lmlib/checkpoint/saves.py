"""Saving a step, on a disk or in a bucket.

Each process writes the arrays that its devices hold, and leaves a list of digests for process 0.
Process 0 writes the manifest and makes the step visible.
"""

import itertools
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from lmlib.checkpoint.arrays import check_layout, saved_arrays
from lmlib.checkpoint.in_bucket.uploads import StepInBucket
from lmlib.checkpoint.manifest import NOTES_FILE, SavedFile, digest_of
from lmlib.checkpoint.on_disk import StepOnDisk
from lmlib.checkpoint.processes import wait_for_all
from lmlib.storage.bucket.store import REQUESTS

_SENT = "digests_of_process_{}.json"  # sent to process 0, until the manifest is written
_saves = itertools.count()  # the same on every process


def begin_save(
    step: StepOnDisk | StepInBucket,
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
            with ThreadPoolExecutor(REQUESTS) as threads:  # one by one, a thousand take a minute
                for sent in threads.map(take_digests, range(1, jax.process_count())):
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

    def take_digests(process: int) -> dict[str, SavedFile]:
        name = _SENT.format(process)
        sent = json.loads(step.files.read(name))
        step.delete(name)
        return {file: SavedFile(*facts) for file, facts in sent.items()}

    def run() -> None:
        try:
            finish()
        except BaseException as error:
            saved.set_exception(error)
        else:
            saved.set_result(None)

    threading.Thread(target=run, name="save", daemon=True).start()
    return saved
