"""Removal of a checkpoint on a disk, which a reader can tell from damage.

Its folder is renamed before the first file is deleted, so a reader finds the checkpoint whole, or
not at all. If the folder is still there, a file that cannot be read is damage.
"""

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lmlib.checkpoint.folders import UNFINISHED, is_there, unfinished_in
from lmlib.storage.local_folder import shown
from lmlib.storage.whole_file import sync

REMOVED = f"{UNFINISHED}-removed"  # ending of the folder of a step that is being deleted

_HELD = {errno.ENOTEMPTY, errno.EBUSY}  # NFS keeps a deleted file while a reader has it open


class RemovedCheckpointError(ValueError):
    """A checkpoint that was there, and is gone: neither damage nor a slip of the fingers.

    Attributes:
      folder: where it was.
    """

    def __init__(self, folder: Path):
        super().__init__(
            f"the checkpoint {shown(folder)} was removed meanwhile, as a run that goes on removes "
            "those that it need not keep"
        )
        self.folder = folder


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """A block that reads a step's folder, which was there before.

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
    """Deletes the folders of steps in one directory. A kill or a power cut meanwhile leaves folders
    with the ending `REMOVED`, and no half of a step. `check` is called before each renaming."""
    leaving = [step.with_name(step.name + REMOVED) for step in steps]
    for step, left in zip(steps, leaving, strict=True):
        check()
        step.rename(left)
    for directory in {left.parent for left in leaving}:
        sync(directory)
    for left in leaving:
        _delete(left)


def begun_in(directory: Path) -> list[Path]:
    """The folders of removals that run, or that were killed."""
    return [folder for folder in unfinished_in(directory) if folder.name.endswith(REMOVED)]


def finish(directory: Path) -> None:
    """Deletes the folders of killed saves and removals in a directory of checkpoints."""
    for folder in unfinished_in(directory):
        _delete(folder)


def _delete(folder: Path) -> None:
    """Deletes a folder. Files that NFS keeps for a reader stay until the next time."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno not in _HELD:
            raise
