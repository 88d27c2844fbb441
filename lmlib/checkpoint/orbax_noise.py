"""What Orbax and TensorStore write to the terminal, kept off it."""

import logging
import sys
import traceback
from collections.abc import Callable

_CLOSED = "Event loop is closed"


class OrbaxNoise(logging.Filter):
    """Drops what they say of saves, since `Checkpoints` says it in words.

    Those are Orbax's INFO lines, its tracebacks, and its warning that there is no OCDBT to merge:
    under `absl.app.run` some forty lines a save, and a hundred for one that fails, where each of
    its threads and tasks logs the error. After a failure TensorStore's threads also call on an
    event loop that Orbax has closed, with a traceback for each array. They may do so long after:
    what is installed stays.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "asyncio":
            return record.exc_info is None or not _through_orbax(record.exc_info[1])
        if "orbax" not in record.pathname:
            return True
        told = record.levelno >= logging.WARNING and record.exc_info is None
        return told and "merge of OCDBT" not in record.getMessage()


def install() -> None:
    """Once for the process; again changes nothing."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(each, OrbaxNoise) for each in logger.filters):
            logger.addFilter(OrbaxNoise())
    if not isinstance(sys.unraisablehook, _Quiet):
        sys.unraisablehook = _Quiet(sys.unraisablehook)


class _Quiet:
    """An `unraisablehook` that passes on all but the calls on a closed event loop."""

    def __init__(self, hook: Callable[["sys.UnraisableHookArgs"], object]):
        self._hook = hook

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != _CLOSED:
            self._hook(unraisable)


def _through_orbax(error: BaseException | None) -> bool:
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return any("orbax" in frame.filename for frame in frames) or _CLOSED in str(error)
