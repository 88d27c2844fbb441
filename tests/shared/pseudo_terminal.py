"""Commands on a terminal of their own, and their output."""

import os
import pty
import select
import termios
import time
import unicodedata
from collections.abc import Sequence

from forked_processes import SECONDS, ForkedProcess

# Writes the clipboard; begins a sequence in C1; turns a line around; deletes.
HOSTILE = "a\x1b]52;c;aGk=\x07b\x9b2Jc\u202ed\u2066e\x7ff\rg\x00"
SHOWN = r"a\x1b]52;c;aGk=\x07b\x9b2Jc\u202ed\u2066e\x7ff\rg\x00"
_TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def commands_in(text: str) -> set[str]:
    """The characters of a text that a terminal takes for commands, but tab and newline."""
    return {
        each
        for each in text
        if (unicodedata.category(each) == "Cc" and each not in "\t\n")
        or unicodedata.bidirectional(each) in _TURNING
    }


def run_on_terminal(*arguments: str, typed: Sequence[str] = ()) -> tuple[int, str]:
    """Runs `python ARGUMENTS` on a terminal; returns its status and output.

    Each of `typed` is typed when it asks with "> ".
    """
    ours, its = pty.openpty()
    settings = termios.tcgetattr(its)
    settings[1] &= ~termios.OPOST  # output is read as it was sent
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(its, termios.TCSANOW, settings)
    termios.tcsetwinsize(its, (24, 120))
    process = ForkedProcess(
        *arguments, stdin=its, stdout=its, stderr=its, environment={"TERM": "dumb"}
    )
    os.close(its)
    sent, answers, limit = bytearray(), iter(typed), time.monotonic() + SECONDS
    while (more := _more(ours, process)) is not None:
        sent += more
        if more and sent.endswith(b"> "):
            os.write(ours, next(answers).encode())
        if time.monotonic() > limit:
            process.kill()
    os.close(ours)
    return process.wait(), sent.decode()


def _more(terminal: int, process: ForkedProcess) -> bytes | None:
    """Returns new output, perhaps none; None once the process has ended and all has been read."""
    ended = process.poll() is not None
    ready, _, _ = select.select([terminal], [], [], 0 if ended else 0.1)
    if not ready:
        return None if ended else b""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux's way to say that no process has the terminal any more
        process.wait(SECONDS)
        return None
