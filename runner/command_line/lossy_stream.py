"""Output streams that cannot stall or end a run.

`lossy_standard_streams` installs them as stdout and stderr. This is the only place that ignores
errors of the terminal, such as a closed pipe.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

from lmlib.terminal.text import text_stream

PATIENCE_SECONDS = 5.0  # how long an idle reader may block the writer
_AT_ONCE = 4096  # bytes that a ready pipe takes without blocking (PIPE_BUF on Linux)


class LossyStream(io.RawIOBase):
    """A file, pipe or terminal whose writes never fail and never block for long.

    Output that cannot be written, because the disk is full or nobody reads, is dropped. Once
    writing works again, a line reports how many bytes are missing, and why.

    Attributes:
      dropped: bytes that were lost and not reported yet.
      reason: the error message of the last loss.
    """

    def __init__(self, open_: Callable[[], int]):
        """`open_` returns the file descriptor; it is called again after each OSError."""
        super().__init__()
        self._open = open_
        self._descriptor: int | None = None
        self._at_line_start = True
        self._patient = True  # False after a reader blocked the stream for too long
        self.dropped, self.reason = 0, ""

    def write(self, text: Any, /) -> int:
        """Writes the bytes `text` as far as possible; always returns their full length."""
        content = bytes(text)
        self.flush()
        self.dropped += len(content) - (0 if self.dropped else self._put(content))
        return len(content)

    def flush(self) -> None:
        """Reports dropped bytes if the stream can be written again."""
        if self.dropped:
            new_line = "" if self._at_line_start else "\n"
            line = f"{new_line}[{self.dropped:,} bytes were lost here: {self.reason}]\n".encode()
            if self._put(line) == len(line):
                self.dropped = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Returns the file descriptor; raises OSError if the file cannot be opened."""
        if self._descriptor is None:
            self._descriptor = self._open()
        return self._descriptor

    def isatty(self) -> bool:
        try:
            return os.isatty(self.fileno())
        except OSError:
            return False

    def _put(self, content: bytes) -> int:
        """Writes as much of `content` as possible; returns the number of bytes written."""
        done = 0
        try:
            descriptor = self.fileno()
            ready = select.poll()
            ready.register(descriptor, select.POLLOUT)
            while done < len(content):
                if not ready.poll(PATIENCE_SECONDS * 1000 if self._patient else 0):
                    self._patient = False
                    raise BlockingIOError(errno.EAGAIN, "nobody reads")
                done += os.write(descriptor, content[done : done + _AT_ONCE])
            self._patient = True
        except OSError as error:
            self.reason = os.strerror(error.errno or errno.EIO)
        if done:
            self._at_line_start = content[done - 1 : done] == b"\n"
        return done


def lossy_standard_streams() -> None:
    """Replaces stdout and stderr of this process with lossy streams.

    Closed standard streams are opened as /dev/null. Otherwise the next file that is opened, such as
    a checkpoint's, would get their number, and libraries would write messages to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            if null != number:
                os.dup2(null, number)
                os.close(null)
    sys.stdout, sys.stderr = _lossy(sys.stdout, 1), _lossy(sys.stderr, 2)


def _lossy(stream: TextIO | None, number: int) -> TextIO:
    encoding = "utf-8" if stream is None else stream.encoding
    raw = LossyStream(lambda: number)  # unbuffered, like Python's own streams with -u
    return text_stream(raw, encoding, redraws=number == 2)
