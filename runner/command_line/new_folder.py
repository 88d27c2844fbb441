"""A folder that the user names: whole or absent, and made by one command at a time."""

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

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}  # on some mounts
_NOT_FREE = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


@contextlib.contextmanager
def made_whole(to: Path) -> Iterator[Path]:
    """An empty folder beside `to`, which takes its name at the end of the block. An error removes
    it, and so does another command after a kill.

    Raises:
      ConfigError: if `to` is not empty or cannot be made, or another command makes it.
    """
    check_can_be_made(to)
    _check_free(to)
    whole = to.absolute()
    unfinished = whole.with_name(f".{to.name}.unfinished")
    make_folder(whole.parent)
    with _alone(unfinished.with_suffix(".lock"), to) as locked:
        _check_free(to)  # another command may have made it just now
        if locked:
            shutil.rmtree(unfinished, ignore_errors=True)  # a kill left it
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
    """A block for one process at a time; whether it is alone in it, or there are no locks here."""
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
    """A descriptor of `file` with the kernel's lock, or `None` where there are no locks; raises
    BlockingIOError if another process holds it."""
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
        os.close(held)  # whoever held it has just ended, and deleted it


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether it is the file that `descriptor` is of."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _check_free(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to={to} is not empty: give a new folder")
