"""Output that cannot hold a run up or end it.

`lossy_standard_streams` gives a process such a stdout and stderr: this is the only place where
errors of the terminal, such as a reader that went away, are swallowed.
"""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

from lmlib.terminal.text import text_stream

PATIENCE_SECONDS = 5.0  # that a reader who takes nothing may hold the writer up
_AT_ONCE = 4096  # bytes: a pipe that is ready takes so many without blocking (PIPE_BUF on Linux)


class LossyStream(io.RawIOBase):
    """A file, pipe or terminal to which a write never fails, and never blocks for long.

    What cannot be written, since the disk is full or nobody reads, is dropped. As soon as something
    can be written again, a line says how many bytes are missing, and why.
    """

    def __init__(self, open_: Callable[[], int]):
        """`open_` gives the file descriptor; it is called again until it raises no OSError."""
        super().__init__()
        self._open = open_
        self._descriptor: int | None = None
        self._at_line_start = True
        self._patient = True  # until a reader has kept it waiting for too long
        self.dropped = 0  # bytes that no line has told of yet
        self.reason = ""

    def write(self, text: Any, /) -> int:
        """Takes all of `text`, bytes, whatever becomes of it; returns its length."""
        content = bytes(text)
        if self._told_of_loss():
            written = self._put(content)
            self.dropped += len(content) - written
        else:
            self.dropped += len(content)
        return len(content)

    def flush(self) -> None:
        """Tells of what was dropped, if it can by now."""
        self._told_of_loss()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Raises OSError if there is no file."""
        if self._descriptor is None:
            self._descriptor = self._open()
        return self._descriptor

    def isatty(self) -> bool:
        try:
            return os.isatty(self.fileno())
        except OSError:
            return False

    def _told_of_loss(self) -> bool:
        """Whether no loss is left to tell of."""
        if self.dropped:
            new_line = "" if self._at_line_start else "\n"
            line = f"{new_line}[{self.dropped:,} bytes were lost here: {self.reason}]\n".encode()
            if self._put(line) == len(line):
                self.dropped = 0
        return not self.dropped

    def _put(self, content: bytes) -> int:
        """How many bytes of `content` could be written."""
        done = 0
        try:
            descriptor = self.fileno()
            while done < len(content):
                self._wait_for_reader(descriptor)
                done += os.write(descriptor, content[done : done + _AT_ONCE])
            self._patient = True
        except OSError as error:
            self.reason = os.strerror(error.errno or errno.EIO)
        if done:
            self._at_line_start = content[done - 1 : done] == b"\n"
        return done

    def _wait_for_reader(self, descriptor: int) -> None:
        """Raises BlockingIOError if nobody reads what is there."""
        ready = select.poll()
        ready.register(descriptor, select.POLLOUT)
        if not ready.poll(PATIENCE_SECONDS * 1000 if self._patient else 0):
            self._patient = False
            raise BlockingIOError(errno.EAGAIN, "nobody reads")


def lossy_standard_streams() -> None:
    """Replaces stdout and stderr of this process; they may be closed.

    A closed standard stream becomes /dev/null: its number would otherwise go to the next file that
    is opened, a checkpoint's, and libraries write to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if null != number:
                os.dup2(null, number)
                os.close(null)
    sys.stdout, sys.stderr = _lossy(sys.stdout, 1), _lossy(sys.stderr, 2)


def _lossy(stream: TextIO | None, number: int) -> TextIO:
    encoding = "utf-8" if stream is None else stream.encoding
    raw = LossyStream(lambda: number)  # unbuffered, as Python's own streams are with -u
    return text_stream(raw, encoding, redraws=number == 2)
