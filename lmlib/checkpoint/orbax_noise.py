"""What Orbax and TensorStore write to the terminal, kept off it."""

import logging
import sys


class OrbaxNoise(logging.Filter):
    """From `begin` to `end` drops what they say of saves, since `Checkpoints` says it in words.

    Those are Orbax's INFO lines, its tracebacks, and its warning that there is no OCDBT to merge:
    under `absl.app.run` some forty lines a save, and a hundred for one that fails, where each of
    its threads logs the error. After a failure TensorStore's threads call on an event loop that
    Orbax has closed, with a traceback for each array.
    """

    def begin(self) -> None:
        logging.getLogger("absl").addFilter(self)
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def end(self) -> None:
        logging.getLogger("absl").removeFilter(self)
        if sys.unraisablehook == self._unraisable:
            sys.unraisablehook = self._hook

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        told = record.levelno >= logging.WARNING and record.exc_info is None
        return told and "merge of OCDBT" not in record.getMessage()

    def _unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)
