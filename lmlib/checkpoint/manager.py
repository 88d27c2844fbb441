"""Orbax's manager of checkpoints, set up so that a step is on the disk before an older one goes.

Orbax deletes a step file by file under its own name, so it is told to keep all, and ours removes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from lmlib.checkpoint import arrays as saved
from lmlib.checkpoint import notes as saved_notes
from lmlib.checkpoint.folders import unfinished_folder
from lmlib.checkpoint.manifest import MANIFEST
from lmlib.checkpoint.orbax_internals import STEP_FILES, ManagerOfOneFolder
from lmlib.checkpoint.processes import orbax_barrier
from lmlib.checkpoint.writing import ArraysHandler
from lmlib.storage.whole_file import sync

_FOR_EVER = 3_000_000_000  # seconds


def open_manager(
    directory: Path,
    opening: str,
    written: Callable[[Path], None],
    finish: Callable[[], None],
    remove_old: Callable[[Path], None],
    save_seconds: int,
) -> ManagerOfOneFolder:
    """A manager of the steps in `directory`.

    Args:
      opening: ends the names of the folders that steps are in until they are whole.
      written: gets the folder of the arrays, on every process, once they are all written.
      finish: called on process 0 when the files of all are written and before the step gets its
        name.
      remove_old: gets the directory, on process 0, when the step has its name on the disk.
      save_seconds: limit of the processes' wait for each other in a save.
    """
    return _Manager(
        directory,
        options=ocp.CheckpointManagerOptions(
            create=False,
            lightweight_initialize=True,  # otherwise it reads files that no digest covers
            temporary_path_class=_durable_folder(opening, remove_old),
            async_options=ocp.AsyncOptions(
                # By the clock on the wall, which may be set meanwhile.
                timeout_secs=save_seconds if jax.process_count() > 1 else _FOR_EVER,
                barrier_sync_fn=orbax_barrier(),
                post_finalization_callback=finish,
                # Otherwise, where a folder cannot be made, Orbax waits five minutes for it.
                create_directories_asynchronously=False,
            ),
        ),
        item_handlers={
            saved.STATE: ArraysHandler(written, save_seconds),
            saved_notes.NOTES: saved_notes.handler(),
        },
    )


class _Manager(ManagerOfOneFolder):
    def reached_preemption(self, step: int) -> bool:
        """Never: Orbax would ask JAX after each save. A run that stops on signals asks JAX itself,
        after each step, and JAX must not be asked about earlier steps in between."""
        return False


def _durable_folder(
    opening: str,
    then: Callable[[Path], None],
) -> type[ocp.path.atomicity.AtomicRenameTemporaryPath]:
    """What a step is in until it is whole; `then` is called once its new name is on the disk."""

    class DurableFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
        @classmethod
        def from_final(cls, final_path: Any, **settings: Any) -> Any:
            if not final_path.name.isdecimal():  # a part of a step
                return super().from_final(final_path, **settings)
            name = unfinished_folder(Path(), int(final_path.name), opening).name
            return cls(final_path.with_name(name), final_path, **settings)

        async def finalize(self) -> None:
            await super().finalize()  # which writes `STEP_FILES`, and renames it
            final = Path(self.get_final())
            if not (final / MANIFEST).exists():
                return  # a part of a step, which is synced with the step
            for name in STEP_FILES:
                sync(final / name)
            sync(final)
            sync(final.parent)
            then(final.parent)

    return DurableFolder
