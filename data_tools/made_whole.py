"""A folder that appears under its name when it is whole."""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """An empty folder `<name>.making-…` beside `folder`, which takes its name at the end.

    An error removes it. Several processes may make the same: that of the first stays.
    """
    making, held = _locked(folder)
    try:
        yield making
        making.chmod(0o755)  # temporary folders are private
        try:
            making.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
        os.close(held)


def remove_unfinished(folder: Path) -> None:
    """Removes what killed processes have left of a folder that others have made since."""
    for making in folder.parent.glob(f"{glob.escape(folder.name)}.making-*"):
        with contextlib.suppress(OSError):  # it is being made, or was removed, or knows no locks
            held = os.open(making, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(making, ignore_errors=True)
            finally:
                os.close(held)


def _locked(folder: Path) -> tuple[Path, int]:
    """A new folder and its descriptor, which holds a lock until it is closed."""
    while True:
        making = Path(tempfile.mkdtemp(prefix=f"{folder.name}.making-", dir=folder.parent))
        with contextlib.suppress(FileNotFoundError):
            held = os.open(making, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(held, fcntl.LOCK_EX)
            if making.is_dir():  # else `remove_unfinished` was quicker
                return making, held
            os.close(held)
