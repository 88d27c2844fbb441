"""Shows the current activity of a command: periodic lines, or a line redrawn in place."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Self, TextIO

from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.text import shown, text_stream

BAR_WIDTH = 20
CLEAR_LINE = "\r\x1b[K"  # the old line may be longer than the new one
REDRAW_SECONDS = 1.0  # time between redraws on a terminal
LINE_SECONDS = 10.0  # time between lines elsewhere


def now_and_then(
    show: Callable[[str], None], seconds: float = LINE_SECONDS
) -> Callable[[Callable[[], str]], None]:
    """Returns a function that shows the line its argument makes, at most once every `seconds`."""
    last = time.monotonic()

    def tell(line: Callable[[], str]) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= seconds:
            last = now
            show(line())

    return tell


def told(doing: str, show: Callable[[str], None]) -> Callable[[int, int], None]:
    """Returns a function of the bytes done and in all, which shows "`doing` 1 GB of 2 GB"."""
    tell = now_and_then(show)
    return lambda done, total: tell(lambda: f"{doing} {bytes_text(done)} of {bytes_text(total)}")


def fitting(line: str, stream: TextIO) -> str:
    """Cuts `line` to the width of the terminal, since a wrapped line cannot be redrawn."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except OSError:  # the terminal was closed
        width = 0
    return shown(line)[: width - 1] if width else line  # 0 if the terminal doesn't report its width


def bar(done: float) -> str:
    """Returns a progress bar; `done` is a fraction."""
    return f"[{'=' * int(BAR_WIDTH * done):{BAR_WIDTH}}]"


class LiveLine:
    """A line that is redrawn in place on a terminal, below messages; elsewhere only messages."""

    def __init__(self, stream: TextIO | None):
        """Shows nothing without a `stream`."""
        self._stream, self.line = stream, ""
        self.live = stream is not None and stream.isatty()
        self._writing = threading.RLock()

    def draw(self) -> None:
        """Draws `line` on a terminal."""
        if self.live:
            self._write(f"{CLEAR_LINE}{self._fitting()}")

    def message(self, text: str) -> None:
        """Writes `text` on separate lines, above the live line."""
        self._write(f"{CLEAR_LINE}{text}\n{self._fitting()}" if self.live else f"{text}\n")

    def close(self, keep: bool = True) -> None:
        """Moves the cursor below the line, or erases the line if not `keep`."""
        if self.line:
            if not keep:
                self.line = ""
            self.draw()
            if self.live and keep:
                self._write("\n")
        self.line = ""

    def _fitting(self) -> str:
        assert self._stream is not None
        return fitting(self.line, self._stream)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            with self._writing:
                self._stream.write(text)
                self._stream.flush()


class ProgressLine:
    """Writes each given line, followed by the elapsed time until the next line.

        with ProgressLine() as tell:
            tell("compiling the step")
            …

    On a terminal, the line is redrawn in place; elsewhere new lines are written periodically. Each
    line begins with the seconds since the start. By default, lines go to a duplicate of stderr, so
    they are shown even while the output of compilers is redirected.
    """

    def __init__(self, stream: TextIO | None = None, seconds: float | None = None):
        """Prepares the output, with an update of the elapsed time every `seconds`."""
        self._own = stream is None
        self._stream = stream or text_stream(
            os.fdopen(os.dup(sys.stderr.fileno()), "wb"), "utf-8", redraws=True
        )
        self._shown = LiveLine(self._stream)
        self._seconds = seconds or (REDRAW_SECONDS if self._shown.live else LINE_SECONDS)
        self._began = time.monotonic()
        self._line, self._since = "", self._began
        self._writing, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._update, daemon=True)

    def __call__(self, line: str) -> None:
        with self._writing:
            self._shown.close()
            self._line, self._since = line, time.monotonic()
            self._show(line)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._shown.close()
        if self._own:
            self._stream.close()

    def _update(self) -> None:
        while not self._over.wait(self._seconds):
            with self._writing:
                if self._line:
                    self._show(f"{self._line}: {time.monotonic() - self._since:.0f} s so far")

    def _show(self, line: str) -> None:
        timed = f"[{time.monotonic() - self._began:5.1f} s] {line}"
        if self._shown.live:
            self._shown.line = timed
            self._shown.draw()
        else:
            self._shown.message(timed)
