"""What is written while a command does one long thing."""

import io
import threading

from lmlib.plan.planner import stderr_kept
from runner.monitoring.telling import Telling


class Seen(io.StringIO):
    """A stream that says when something was written to it for the third time."""

    def __init__(self, live=False):
        super().__init__()
        self.writes, self.enough, self.live = 0, threading.Event(), live

    def isatty(self):
        return self.live

    def fileno(self):
        raise OSError("no terminal")

    def write(self, text):
        self.writes += 1
        if self.writes == 3:
            self.enough.set()
        return super().write(text)


def told(live):
    stream = Seen(live)
    with Telling(stream, seconds=1e-3) as tell:
        tell("compiling the step")
        assert stream.enough.wait(timeout=60)
    return stream.getvalue()


def test_a_line_follows_now_and_then_where_there_is_no_terminal():
    first, *others = told(live=False).splitlines()
    assert first.startswith("[  0.") and first.endswith(" s] compiling the step")
    assert len(others) >= 2
    assert all(line.endswith("] compiling the step: 0 s so far") for line in others)


def test_on_a_terminal_one_line_is_redrawn():
    text = told(live=True)
    assert text.count("\n") == 1 and text.endswith("\n")
    assert text.count("\r") >= 3


def test_it_is_seen_while_the_compilers_stderr_is_kept(capfd):
    with Telling() as tell, stderr_kept():
        tell("compiling the step")
    out, err = capfd.readouterr()
    assert out == "" and err.endswith("] compiling the step\n")
