"""Removal of a checkpoint on a disk, in a way that readers can distinguish from damage.

Its folder is renamed before the first file is deleted, so a reader finds the checkpoint complete or
absent. If the folder still exists, an unreadable file is damage.
"""

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lmlib.checkpoint.folders import UNFINISHED, is_there, unfinished_in
from lmlib.storage.atomic_file import sync
from lmlib.storage.local_folder import shown

REMOVED = f"{UNFINISHED}-removed"  # suffix of the folder of a step that is being deleted

_HELD = {errno.ENOTEMPTY, errno.EBUSY}  # NFS keeps a deleted file while a reader has it open


class RemovedCheckpointError(ValueError):
    """A checkpoint that existed but was removed: neither damage nor a wrong name.

    Attributes:
      folder: its former place.
    """

    def __init__(self, folder: Path):
        super().__init__(
            f"the checkpoint {shown(folder)} was removed meanwhile, as a run that goes on removes "
            "those that it need not keep"
        )
        self.folder = folder


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Context manager for reading a step's folder that existed before.

    Raises:
      RemovedCheckpointError: in place of the block's error, if the folder is gone by then.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if is_there(folder):
            raise
        raise RemovedCheckpointError(folder) from error


def remove(steps: Sequence[Path], check: Callable[[], None] = lambda: None) -> None:
    """Deletes the folders of steps in one directory.

    A kill or a power cut meanwhile leaves folders with the suffix `REMOVED`, but never half a step.
    `check` is called before each rename.
    """
    leaving = [step.with_name(step.name + REMOVED) for step in steps]
    for step, left in zip(steps, leaving, strict=True):
        check()
        step.rename(left)
    for directory in {left.parent for left in leaving}:
        sync(directory)
    for left in leaving:
        _delete(left)


def begun_in(directory: Path) -> list[Path]:
    """Returns the folders of running or killed removals."""
    return [folder for folder in unfinished_in(directory) if folder.name.endswith(REMOVED)]


def finish(directory: Path) -> None:
    """Deletes the leftovers of killed saves and removals in a directory of checkpoints."""
    for folder in unfinished_in(directory):
        _delete(folder)


def _delete(folder: Path) -> None:
    """Deletes a folder. Files that NFS keeps for a reader stay until the next removal."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno not in _HELD:
            raise
