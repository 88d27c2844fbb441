"""What compilers write to stderr: they know nothing of Python's `sys.stderr`."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


class CompilerLog:
    """`text` is what was written, once it is over."""

    text = ""


@contextlib.contextmanager
def captured() -> Iterator[CompilerLog]:
    """Keeps what the process writes to its stderr, Python's own included, and shows none of it."""
    log = CompilerLog()
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            file.seek(0)
            log.text = file.read().decode(errors="replace")
