"""Storage errors as messages with the file, the cause and a remedy."""

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
    """Returns an error that names the failed action and its cause.

    Args:
      doing: the failed action, as in `cannot {doing}`.
      folder: the folder in which it failed.
      code: the operating system's errno.
    """
    cause = _full(folder) if code == errno.ENOSPC else _CAUSES.get(code, os.strerror(code))
    return OSError(code, f"cannot {doing}: {cause} ({os.strerror(code)})")


def _full(folder: Path) -> str:
    """Returns the exhausted resource: bytes or inodes; each file and folder takes one inode."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        system = os.statvfs(there)
    except OSError:
        return "the disk is full: make room there"
    free = system.f_bavail * system.f_frsize
    if system.f_files and not system.f_favail:  # both are 0 if inodes are not counted
        return (
            f"its file system takes no more files, all {system.f_files:,} inodes are in use and "
            f"{free:,} bytes are free: delete files there"
        )
    return f"the disk is full, {free:,} bytes are free: make room there"
