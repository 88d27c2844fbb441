"""Errors of the storage, as messages that name the directory and the cause."""

import errno
import os
import shutil
from pathlib import Path

from lmlib.checkpoint.orbax_internals import tensorstore_error_number

_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EFBIG: "a file would be larger than this process may write (ulimit -f)",
    errno.ENOENT: "the directory was deleted or moved while it was in use",
    errno.EIO: "the disk reports an error",
    errno.ESTALE: "the file server has lost the directory",
}


def storage_error(doing: str, directory: Path, error: BaseException) -> OSError | None:
    """An error that names directory and cause, or `None` if the storage is not to blame.

    Args:
      doing: what failed, as in `cannot {doing}`.
      error: as Orbax or TensorStore raised it: an OSError, or one with its text inside.
    """
    code = _error_number(error)
    if code is None:
        return None
    cause = _CAUSES.get(code, os.strerror(code))
    if code == errno.ENOSPC:
        cause += f", {shutil.disk_usage(directory).free:,} bytes are free"
    return OSError(code, f"cannot {doing} in {directory}: {cause} ({os.strerror(code)})")


def _error_number(error: BaseException) -> int | None:
    """The number of the operating system's error that is behind `error`."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno
        if (number := tensorstore_error_number(str(seen))) is not None:
            return number
        seen = seen.__cause__ or seen.__context__
    return None
