"""Folders that a command creates, on a disk or in a bucket: whole or absent."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from lmlib.storage.atomic_file import make_folder, sync
from lmlib.storage.bucket.copies import place_to_write
from lmlib.storage.bucket.store import BucketStore, upload
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import local_folder
from runner.command_line.paths import check_can_be_made
from runner.errors import ConfigError

_NOT_FREE = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}


@contextlib.contextmanager
def made_whole(to: Path) -> Iterator[Path]:
    """Yields an empty temporary folder next to `to`, and renames it to `to` after the block.

    The temporary folder is removed after an error. If the process is killed, the next command
    removes it. Raises ConfigError if `to` is not empty or cannot be created, or another command is
    creating it.
    """
    check_can_be_made(to)
    _check_free(to)
    whole = to.absolute()
    unfinished = whole.with_name(f".{to.name}.unfinished")
    make_folder(whole.parent)
    unfinished.mkdir(exist_ok=True)
    held = os.open(unfinished, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--to={to}: another command makes it; give a new folder, or wait for that one"
            ) from error
        except OSError as error:  # some mounts cannot lock folders
            if any(unfinished.iterdir()):
                raise ConfigError(
                    f"--to={to}: another command makes it; if that was killed, delete {unfinished}"
                ) from error
        _check_free(to)  # another command may have renamed the locked folder in the meantime
        for left in unfinished.iterdir():  # left by a killed process
            shutil.rmtree(left) if left.is_dir() else left.unlink()
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
    finally:
        os.close(held)


def _check_free(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"--to={to} is not empty: give a new folder")


@contextlib.contextmanager
def destination(
    to: str, last: Collection[str], progress: Callable[[int, int], None]
) -> Iterator[Path]:
    """Yields a local path in which the block creates the folder `to`.

    If `to` is in a bucket, the files are uploaded at the end of the block, and the local ones are
    removed.

    Args:
      to: a local path or a bucket's URL.
      last: names of files that mark the folder as complete; they are uploaded last.
      progress: called with the uploaded bytes and the total bytes.

    Raises:
      ConfigError: if the folder in the bucket is not empty, or another command is creating it.
      BucketError: if the bucket cannot be read or written.
    """
    url = BucketUrl.parsed(to)
    if url is None:
        yield local_folder(to)
        return
    store = BucketStore(url)
    if store.list():
        raise ConfigError(f"--to={to} is not empty: give a new folder")
    with contextlib.ExitStack() as held:
        try:
            copy = held.enter_context(place_to_write(url))
        except BlockingIOError as error:
            raise ConfigError(f"--to={to}: another command of this machine makes it") from error
        held.callback(shutil.rmtree, copy, ignore_errors=True)
        yield copy
        upload(copy, store, last, progress)
