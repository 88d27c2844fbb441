"""Orbax's log lines, kept off the terminal."""

import logging


class OrbaxNoise(logging.Filter):
    """Drops Orbax's INFO lines, its tracebacks, and its warning that there is no OCDBT to merge.

    Under `absl.app.run` it writes some forty lines a save, and a hundred for one that fails: each
    of its threads logs the error, which `Checkpoints` raises with the cause in words.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        told = record.levelno >= logging.WARNING and record.exc_info is None
        return told and "merge of OCDBT" not in record.getMessage()
