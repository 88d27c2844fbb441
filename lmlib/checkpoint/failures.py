"""Errors of the storage that Orbax and TensorStore raise, as messages that name the directory."""

from pathlib import Path

from lmlib.checkpoint.orbax_internals import tensorstore_error_number
from lmlib.storage_failures import storage_failure


def storage_error(doing: str, directory: Path, error: BaseException) -> OSError | None:
    """An error that names directory and cause, or `None` if the storage is not to blame.

    Args:
      doing: what failed, as in `cannot {doing}`.
      error: as Orbax or TensorStore raised it: an OSError, or one with its text inside.
    """
    code = _error_number(error)
    if code is None:
        return None
    if isinstance(error, OSError) and str(error.strerror).startswith("cannot "):
        # It names the file and the cause.
        return OSError(code, f"cannot {doing} in {directory}: {error.strerror}")
    return storage_failure(f"{doing} in {directory}", directory, code)


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
