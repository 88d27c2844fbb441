"""What this library relies on of Orbax and TensorStore that is no interface of theirs.

Names of files and folders, and texts of log lines and errors. tests/test_orbax_internals.py makes
real saves and fails where a new version of theirs has changed one.
"""

import contextlib
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

UNFINISHED = ".orbax-checkpoint-tmp"  # ending of the folder of a step that is being saved
STEP_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")  # written after the manifest
# What lies beside the folders of the arrays. Nothing of ours reads it.
LAYOUTS = "array_metadatas"
STATE_FILES = ("_METADATA", "_sharding", "commit_success.txt", f"{LAYOUTS}/")

_OPEN = Path("/proc/self/fd")  # Linux has what is open there, by its number
_NO_OCDBT = "merge of OCDBT"
_WAITED = "Waiting for previous save"
_CLOSED = "Event loop is closed"
_OF_A_CHUNK = "async_serialize_from_host"
_ERROR_NUMBER = re.compile(r"os_error_code='(\d+)'")


class ManagerOfOneFolder(ocp.CheckpointManager):
    """Orbax's manager of a directory that is there when it is made.

    It holds the directory open, and has no other path to it. So that path may hold any character:
    Orbax finds files by patterns and takes gs:/ for a bucket, TensorStore takes a backslash for a
    slash, and both want UTF-8. And a save goes nowhere else: TensorStore makes the folders above a
    file, also those that were deleted or moved since.
    """

    def __init__(self, directory: Path, **settings: Any):
        """Takes what Orbax's takes."""
        self._opened = contextlib.ExitStack()
        self._descriptor: int | None = None
        if _OPEN.is_dir() and directory.is_dir():
            self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            self._opened.callback(os.close, self._descriptor)
            directory = _OPEN / str(self._descriptor)
        super().__init__(directory, **settings)

    @property
    def is_deleted(self) -> bool:
        """Whether its directory was deleted since, and not moved, as far as can be known."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        with self._opened:
            self._descriptor = None
            super().close()


def tensorstore_error_number(text: str) -> int | None:
    """The number of the operating system's error that a text of TensorStore's tells, if any.

    It ends as in "No space left on device [os_error_code='28']".
    """
    found = _ERROR_NUMBER.search(text)
    return int(found[1]) if found else None


class OrbaxNoise(logging.Filter):
    """Drops what Orbax and TensorStore log of saves, since `Checkpoints` says it in words.

    Those are Orbax's INFO lines, its tracebacks, and its warnings that there is no OCDBT to merge
    and that it waited for the save before: under `absl.app.run` some forty lines a save, and a
    hundred for one that fails, where each of its threads and tasks logs the error. After a failure
    TensorStore's threads also call on an event loop that Orbax has closed, with a traceback for
    each array, and errors of other chunks are found that nobody waited for. That may be long after:
    what is installed stays.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "asyncio":
            return record.exc_info is None or not _through_orbax(record.exc_info[1])
        if "orbax" not in record.pathname:
            return True
        told = record.levelno >= logging.WARNING and record.exc_info is None
        return told and not any(text in record.getMessage() for text in (_NO_OCDBT, _WAITED))


def silence() -> None:
    """Keeps the noise off the terminal, from now on; a second call changes nothing."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(each, OrbaxNoise) for each in logger.filters):
            logger.addFilter(OrbaxNoise())
    if not isinstance(sys.unraisablehook, _Quiet):
        sys.unraisablehook = _Quiet(sys.unraisablehook)
    # Of a save that failed, those for the chunks that were still to come.
    warnings.filterwarnings("ignore", f"coroutine '{_OF_A_CHUNK}", RuntimeWarning)


class _Quiet:
    """An `unraisablehook` that passes on all but the calls on a closed event loop."""

    def __init__(self, hook: Callable[["sys.UnraisableHookArgs"], object]):
        self._hook = hook

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != _CLOSED:
            self._hook(unraisable)


def _through_orbax(error: BaseException | None) -> bool:
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    of_tensorstore = not frames and tensorstore_error_number(str(error)) is not None
    return (
        any("orbax" in frame.filename for frame in frames)
        or of_tensorstore
        or _CLOSED in str(error)
    )
