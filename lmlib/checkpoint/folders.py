"""Names and folders in a directory of checkpoints: which steps are there, and their files.

A step on a disk is removed by renaming its folder before the first file is deleted. A reader thus
finds the step complete or absent, and an unreadable file in an existing folder is damage.
"""

import contextlib
import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lmlib.checkpoint.failures import RemovedCheckpointError
from lmlib.checkpoint.in_bucket.steps import steps_at
from lmlib.storage.atomic_file import sync
from lmlib.storage.store import FolderStore, Store
from lmlib.storage.unlinked import check_no_link

DIRECTORY = "checkpoints"  # in a run's folder
UNFINISHED = ".orbax-checkpoint-tmp"  # marks a folder that is being made or removed
REMOVED = f"{UNFINISHED}-removed"  # suffix of the folder of a step that is being deleted
SET_ASIDE = ".damaged"

_HELD = {errno.ENOTEMPTY, errno.EBUSY}  # NFS keeps a deleted file while a reader has it open


def steps_in(directory: Path) -> list[int]:
    """Returns the steps of the complete checkpoints, in order; empty without such a directory.

    Raises LinkError if a run's folder `checkpoints`, or a step's, is a link.
    """
    if directory.name == DIRECTORY:
        check_no_link(directory)
    names = _folder_names(directory)
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def unfinished_in(directory: Path) -> list[Path]:
    """Returns the folders of running or killed saves and removals."""
    return [directory / name for name in _folder_names(directory) if UNFINISHED in name]


def set_aside_in(directory: Path) -> list[Path]:
    """Returns the damaged checkpoints that a run fell back from."""
    return [directory / name for name in _folder_names(directory) if name.endswith(SET_ASIDE)]


def is_there(folder: Path) -> bool:
    """True if the folder of a step exists."""
    steps = steps_at(folder.parent)
    return folder.is_dir() if steps is None else folder.name in steps.kept()


def files_of(folder: Path) -> Store:
    """Returns the files of a step."""
    steps = steps_at(folder.parent)
    return FolderStore(folder) if steps is None else steps.files(folder.name)


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
    """Deletes the folders of steps in one directory on a disk.

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


def remove_unfinished(directory: Path) -> None:
    """Deletes the leftovers of killed saves and removals in a directory on a disk."""
    for folder in unfinished_in(directory):
        _delete(folder)


def _delete(folder: Path) -> None:
    """Deletes a folder. Files that NFS keeps for a reader stay until the next removal."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        if error.errno not in _HELD:
            raise


def _folder_names(directory: Path) -> list[str]:
    if (steps := steps_at(directory)) is not None:
        return sorted(steps.kept())
    if not directory.is_dir():
        return []
    found = []
    for entry in directory.iterdir():
        if entry.name.isdecimal():
            check_no_link(entry)
        if entry.is_dir() and not entry.is_symlink():  # skip foreign entries
            found.append(entry.name)
    return sorted(found)
