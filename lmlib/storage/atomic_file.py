"""Atomic and durable files and folders, safe against kills and power cuts.

Written bytes reach the disk at any later time, and in any order. `fsync` of a file flushes its
content, `fsync` of a folder the names in it.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from lmlib.storage.failures import storage_failure

UNFINISHED = ".unfinished"  # suffix of the file that is written first
_NOT_KNOWN = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}  # fsync of a folder, on some file systems


def write_atomically(
    path: str | os.PathLike[str],
    content: bytes | str,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Replaces the file `path` by `content`, atomically and durably.

    The content goes to a new file `.<name>.<random>.unfinished` in the same folder, which is then
    renamed. File and folder are on disk when this returns, so that neither a kill nor a power cut
    leaves half a file. If several processes write the same file at once, one of them wins, and the
    file has all of its content. An error removes the new file; only a kill can leave it there.

    Args:
      content: a `str` is encoded as UTF-8, with line ends unchanged.
      check: called immediately before the rename, which it prevents by raising.

    Raises:
      OSError: if the folder is absent, full or not writable, naming the file and the cause; the old
        file is then unchanged. After an error of the last step, which makes the folder durable, the
        new file is in place.
    """
    path = Path(path)
    encoded = content.encode("utf-8") if isinstance(content, str) else content
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        try:
            with open(unfinished, "xb") as file:
                file.write(encoded)
                file.flush()
                os.fsync(file.fileno())
            check()
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        sync(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise storage_failure(f"write {path}", path.parent, error.errno) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Creates a folder and its missing parents, durably.

    Raises:
      OSError: if it cannot be created, or is a file.
    """
    path = Path(path).absolute()
    absent = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in absent:
        sync(folder.parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Flushes the content of a file, or the names in a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NOT_KNOWN:
            raise
    finally:
        os.close(opened)


def sync_folders(folder: str | os.PathLike[str]) -> None:
    """Calls `sync` for a folder and all folders in it; links are not followed."""
    for place, _, _ in os.walk(folder):
        sync(place)
