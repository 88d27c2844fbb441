"""Names and folders in a directory of checkpoints, on a disk or in a bucket."""

import shutil
from pathlib import Path

from lmlib.checkpoint.in_bucket.steps import steps_at
from lmlib.storage.atomic_file import sync
from lmlib.storage.folder_store import FolderStore
from lmlib.storage.store import Store
from lmlib.storage.unlinked import check_no_link

DIRECTORY = "checkpoints"  # in a run's folder
UNFINISHED = ".orbax-checkpoint-tmp"  # marks a folder that is being made or removed
SET_ASIDE = ".damaged"


def steps_in(directory: Path) -> list[int]:
    """Returns the steps of the complete checkpoints, in order; empty without such a directory.

    Raises LinkError if a run's folder `checkpoints`, or a step's, is a link.
    """
    if directory.name == DIRECTORY:
        check_no_link(directory)
    names = _folder_names(directory)
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def unfinished_folder(directory: Path, step: int, purpose: str) -> Path:
    """Returns the folder for a step's files until they are complete; `purpose` ends the name."""
    return directory / f"{step}{UNFINISHED}-{purpose}"


def unfinished_in(directory: Path) -> list[Path]:
    """Returns the folders of running or killed saves and removals."""
    return [directory / name for name in _folder_names(directory) if UNFINISHED in name]


def set_aside_in(directory: Path) -> list[Path]:
    """Returns the damaged checkpoints that a run fell back from."""
    return [directory / name for name in _folder_names(directory) if name.endswith(SET_ASIDE)]


def set_aside(folder: Path) -> None:
    """Renames a damaged step on a disk; replaces an earlier damaged one with the same step."""
    aside = folder.with_name(folder.name + SET_ASIDE)
    if aside.exists():
        shutil.rmtree(aside)
    folder.rename(aside)
    sync(folder.parent)


def make_again(directory: Path) -> None:
    """Recreates a deleted directory; raises OSError if its parent is gone as well."""
    directory.mkdir(exist_ok=True)
    sync(directory.parent)


def is_there(folder: Path) -> bool:
    """True if the folder of a step exists."""
    steps = steps_at(folder.parent)
    return folder.is_dir() if steps is None else folder.name in steps.kept()


def files_of(folder: Path) -> Store:
    """Returns the files of a step."""
    steps = steps_at(folder.parent)
    return FolderStore(folder) if steps is None else steps.files(folder.name)


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
