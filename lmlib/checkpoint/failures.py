"""Errors of checkpoints, and storage errors of Orbax and TensorStore as messages."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from lmlib.storage.failures import storage_failure
from lmlib.storage.local_folder import shown

_ERROR_NUMBER = re.compile(r"os_error_code='(\d+)'")


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files differ from the saved ones.

    Attributes:
      folder: the step's folder.
      file: the wrong file, relative to `folder`.
    """

    def __init__(self, folder: Path, file: str, reason: str):
        super().__init__(f"the checkpoint {shown(folder)} is damaged: {file} {reason}")
        self.folder = folder
        self.file = file


class RemovedCheckpointError(ValueError):
    """A checkpoint that was removed while it was read. It is not damaged.

    Attributes:
      folder: its former place.
    """

    def __init__(self, folder: Path):
        super().__init__(
            f"the checkpoint {shown(folder)} was removed meanwhile: a run removes old checkpoints "
            "when it saves new ones"
        )
        self.folder = folder


@contextlib.contextmanager
def named_errors(doing: str, directory: Path) -> Iterator[None]:
    """Context manager that turns storage errors into OSErrors: `cannot {doing} in {directory}: …`.

    Orbax and TensorStore raise OSErrors, or other errors that contain the text of one. Other errors
    pass unchanged.
    """
    doing = f"{doing} in {shown(directory)}"
    try:
        yield
    except Exception as error:
        code = _error_number(error)
        if code is None and isinstance(error, TimeoutError):
            raise TimeoutError(f"cannot {doing}: {error}") from error
        if code is None:
            raise
        if isinstance(error, OSError) and str(error.strerror).startswith("cannot "):
            raise OSError(code, f"cannot {doing}: {error.strerror}") from error  # names the cause
        raise storage_failure(doing, directory, code) from error


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
    """Returns the errno at the end of a TensorStore message: `… [os_error_code='28']`."""
    found = _ERROR_NUMBER.search(text)
    return int(found[1]) if found else None
