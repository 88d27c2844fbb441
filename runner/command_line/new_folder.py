"""Creates a folder atomically, by one command at a time."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lmlib.storage.whole_file import make_folder, sync
from runner.command_line.paths import check_can_be_made
from runner.errors import ConfigError

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}  # some mounts don't support locks
_NOT_FREE = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


@contextlib.contextmanager
def made_whole(to: Path) -> Iterator[Path]:
    """Yields an empty temporary folder next to `to`, and renames it to `to` after the block.

    The temporary folder is removed after an error. If the process is killed, the next command
    removes it.

    Raises:
      ConfigError: if `to` is not empty or cannot be created, or another command is creating it.
    """
    check_can_be_made(to)
    _check_free(to)
    whole = to.absolute()
    unfinished = whole.with_name(f".{to.name}.unfinished")
    make_folder(whole.parent)
    with _alone(unfinished.with_suffix(".lock"), to) as locked:
        _check_free(to)  # another command may have created it in the meantime
        if locked:
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
        try:
            unfinished.mkdir()
        except FileExistsError as error:
            raise ConfigError(
                f"--to={to}: another command makes it; if that was killed, delete {unfinished}"
            ) from error
        try:
            yield unfinished
            for each in (*unfinished.rglob("*"), unfinished):
                sync(each)
            unfinished.rename(whole)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _NOT_FREE:
                _check_free(to)
            raise
        sync(whole.parent)


@contextlib.contextmanager
def _alone(lock: Path, to: Path) -> Iterator[bool]:
    """Lets one process at a time enter the block; yields False if locks are not supported."""
    try:
        held = _locked(lock)
    except BlockingIOError as error:
        raise ConfigError(
            f"--to={to}: another command makes it; give a new folder, or wait for that one"
        ) from error
    try:
        yield held is not None
    finally:
        lock.unlink(missing_ok=True)
        if held is not None:
            os.close(held)


def _locked(file: Path) -> int | None:
    """Opens and locks `file`; returns its descriptor, `None` if locks are not supported.

    Raises:
      BlockingIOError: if another process holds the lock.
    """
    while True:
        held = os.open(file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(held)
            if error.errno in _NO_LOCKS:
                return None
            raise
        if _is_at(file, held):
            return held
        os.close(held)  # the previous owner has just deleted the file, so try again


def _is_at(path: Path, descriptor: int) -> bool:
    """True if `path` is the file of `descriptor`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _check_free(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to={to} is not empty: give a new folder")
