"""Errors of the storage, as messages that say which file, why, and what to do."""

import errno
import os
import shutil
from pathlib import Path

_CAUSES = {
    errno.ENOSPC: "the disk is full",
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
      doing: what failed, as in `cannot {doing}`.
      folder: in which it failed.
      code: the operating system's number of the error.
    """
    cause = _CAUSES.get(code, os.strerror(code))
    if code == errno.ENOSPC:
        cause += _free(folder)
    return OSError(code, f"cannot {doing}: {cause} ({os.strerror(code)})")


def _free(folder: Path) -> str:
    try:
        return f", {shutil.disk_usage(folder).free:,} bytes are free: make room there"
    except OSError:
        return ": make room there"
