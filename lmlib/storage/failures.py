"""Errors of the storage, as messages that say which file, why, and what to do."""

import errno
import os
from pathlib import Path

_CAUSES = {
    errno.EDQUOT: "the disk quota is exceeded: delete something, or ask for more",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EFBIG: "a file would be larger than this process may write (ulimit -f)",
    errno.ENOENT: "the directory was deleted or moved while it was in use",
    errno.EIO: "the disk reports an error",
    errno.ESTALE: "the file server has lost the directory",
}


def storage_failure(doing: str, folder: Path, code: int) -> OSError:
    """An error that says what could not be done, and why.

    Args:
      doing: the failed act, as in `cannot {doing}`.
      folder: in which it failed.
      code: the operating system's number of the error.
    """
    cause = _full(folder) if code == errno.ENOSPC else _CAUSES.get(code, os.strerror(code))
    return OSError(code, f"cannot {doing}: {cause} ({os.strerror(code)})")


def _full(folder: Path) -> str:
    """The full resource: bytes, or inodes, of which each file and each folder takes one."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        system = os.statvfs(there)
    except OSError:
        return "the disk is full: make room there"
    free = system.f_bavail * system.f_frsize
    if system.f_files and not system.f_favail:  # where inodes are not counted both are 0
        return (
            f"its file system takes no more files, all {system.f_files:,} inodes are in use and "
            f"{free:,} bytes are free: delete files there"
        )
    return f"the disk is full, {free:,} bytes are free: make room there"
