"""Converts storage errors of Orbax and TensorStore into messages that name the directory."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from lmlib.storage.failures import storage_failure
from lmlib.storage.local_folder import shown

_ERROR_NUMBER = re.compile(r"os_error_code='(\d+)'")


@contextlib.contextmanager
def named_errors(doing: str, directory: Path) -> Iterator[None]:
    """Context manager that converts storage errors to OSErrors with the directory and the cause.

    Orbax and TensorStore raise OSErrors, or other errors that contain the text of one.

    Args:
      doing: the failed action, as in `cannot {doing}`.
    """
    try:
        yield
    except Exception as error:
        if (named := _named(doing, directory, error)) is not None:
            raise named from error
        raise


def _named(doing: str, directory: Path, error: Exception) -> OSError | None:
    """Returns the converted error; `None` if the storage did not cause it."""
    code, place = _error_number(error), shown(directory)
    if code is None and isinstance(error, TimeoutError):
        return TimeoutError(f"cannot {doing} in {place}: {error}")
    if code is None:
        return None
    if isinstance(error, OSError) and str(error.strerror).startswith("cannot "):
        # It already names the file and the cause.
        return OSError(code, f"cannot {doing} in {place}: {error.strerror}")
    return storage_failure(f"{doing} in {place}", directory, code)


def _error_number(error: BaseException) -> int | None:
    """Returns the errno of the operating system's error behind `error`."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno
        if (number := tensorstore_error_number(str(seen))) is not None:
            return number
        seen = seen.__cause__ or seen.__context__
    return None


def tensorstore_error_number(text: str) -> int | None:
    """Returns the errno in a TensorStore message, if any.

    Such a message ends as in "No space left on device [os_error_code='28']".
    """
    found = _ERROR_NUMBER.search(text)
    return int(found[1]) if found else None
