"""What a reader sees: a log file's lines, and the screen of a small terminal emulator."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from runner.errors import WorkdirLost
from runner.monitoring.progress import Progress


class Clock:
    """Time that passes only when it is told to."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@contextmanager
def terminal(columns: int = 120) -> Iterator[tuple[TextIO, int]]:
    """A pseudo-terminal: the stream to write to, and the descriptor that gets what is written."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        with open(slave, "w") as stream:
            yield stream, master
    finally:
        os.close(master)


def written(stream: TextIO, master: int) -> str:
    """All that was written so far; the terminal hands it over in pieces, so an end is marked."""
    stream.write("\0")
    stream.flush()
    received = b""
    while not received.endswith(b"\0"):
        received += os.read(master, 1 << 16)
    return received[:-1].decode()


def screen(text: str) -> list[str]:
    """The lines that a terminal shows: \\r returns, \\n descends, CSI K erases to the end."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[K|.|\n", text, re.DOTALL):
        if token == "\r":
            column = 0
        elif token == "\n":
            lines.append("")
        elif token == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + token + lines[-1][column + 1 :]
            column += 1
    return lines


def test_plain_lines_at_first_then_every_ten_seconds_and_at_the_end():
    stream, clock = io.StringIO(), Clock()
    with Progress(steps=100, stream=stream, clock=clock) as progress:
        for step in range(1, 101):
            clock.seconds += 1.0
            progress.update(step, loss=2.0, seconds=1.0, tokens_per_second=1e6)
    shown = [int(match) for match in re.findall(r"^step (\d+)/100 ", stream.getvalue(), re.M)]
    assert shown == [1, 2, 3, *range(13, 94, 10), 100]
    assert not set(stream.getvalue()) & {"\r", "\x1b"}


def test_a_plain_line_says_everything():
    stream, clock = io.StringIO(), Clock()
    with Progress(steps=20_000, stream=stream, clock=clock) as progress:
        progress.update(1_000, loss=3.14159, seconds=2.0, tokens_per_second=1_214_000.0)
        clock.seconds = 10.0  # for 10 steps: a second each for the 18,990 that are left
        progress.update(1_010, loss=3.0, seconds=1.0, tokens_per_second=1_214_000.0, mfu=0.4123)
        progress.message("saved")
    assert stream.getvalue().splitlines() == [
        "step 1,000/20,000  loss 3.1416  1.21 M tokens/s  10:33:20 left",
        "step 1,010/20,000  loss 3.0000  1.21 M tokens/s  MFU 41.2%  5:16:30 left",
        "saved",
    ]


def test_without_a_stream_nothing_happens():
    with Progress(steps=2, stream=None) as progress:
        progress.update(1, loss=1.0, seconds=1.0, tokens_per_second=1.0)
        progress.message("unseen")


def test_the_live_line_is_redrawn_in_place_and_messages_stand_above_it():
    clock = Clock()
    with terminal() as (stream, master):
        with Progress(steps=4, stream=stream, clock=clock) as progress:
            progress.message("compiled")
            progress.update(1, loss=12.5, seconds=1.0, tokens_per_second=123_456.0)
            clock.seconds = 30.0
            progress.message("saved\nstep 1")
            progress.update(2, loss=2.5, seconds=1.0, tokens_per_second=1e3)
        assert screen(written(stream, master)) == [
            "compiled",
            "saved",
            "step 1",
            "[==========          ] step 2/4  loss 2.5000  1.00 k tokens/s  0:01:00 left",
            "",
        ]


def test_the_live_line_is_written_ten_times_a_second_at_most():
    clock = Clock()
    with terminal() as (stream, master):
        with Progress(steps=1000, stream=stream, clock=clock) as progress:
            for step in range(1, 901):
                clock.seconds = step / 1000
                progress.update(step, loss=1.0, seconds=1.0, tokens_per_second=1.0)
        text = written(stream, master)
        assert 9 <= text.count("\r\x1b[K") <= 11
        assert "step 900/1,000" in screen(text)[-2]  # the last state stays


def test_the_live_line_never_wraps():
    with terminal(columns=40) as (stream, master):
        with Progress(steps=10, stream=stream) as progress:
            progress.update(5, loss=1.0, seconds=1.0, tokens_per_second=1.0)
        lines = screen(written(stream, master))
        assert [len(line) for line in lines] == [39, 0]


def test_an_error_leaves_the_cursor_below_the_line():
    with terminal() as (stream, master):
        with pytest.raises(KeyError), Progress(steps=10, stream=stream) as progress:
            progress.update(5, loss=1.0, seconds=1.0, tokens_per_second=1.0)
            raise KeyError
        assert screen(written(stream, master))[-1] == ""


def test_a_step_that_was_validated_gets_a_line_of_its_own():
    plain, clock = io.StringIO(), Clock()
    with terminal() as (stream, master):
        outputs = [Progress(9, plain, clock), Progress(9, stream, clock)]
        for progress in outputs:
            for step in range(1, 7):
                progress.update(step, loss=2.0, seconds=1.0, tokens_per_second=10.0)
                if step == 5:
                    progress.validated(5, "validation loss 2.3457 nats per token  over 2 batches")
            progress.close()
        line = "step 5/9  validation loss 2.3457 nats per token  over 2 batches"
        assert plain.getvalue().splitlines()[3:] == [line]
        shown = screen(written(stream, master))
        assert shown[0].startswith(line) and len(shown) == 3  # above the live line, and it stays


def test_the_log_keeps_the_lines_of_every_start_with_the_time(tmp_path):
    for start in (1, 2):
        progress = Progress(9, None, Clock())
        progress.message("before the folder is there")
        progress.keep(tmp_path)
        for step in range(1, 6):
            progress.update(step, loss=start, seconds=1.0, tokens_per_second=10.0)
        with pytest.raises(KeyError, match="gone"), progress:
            raise KeyError("gone")
    lines = (tmp_path / "run.log").read_text().splitlines()
    times, texts = zip(*(line.split("  ", 1) for line in lines if line), strict=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", time) for time in times)
    assert texts[0].startswith(f"=== start of process {os.getpid()} on ")
    assert [text.partition("  ")[0] for text in texts[1:6]] == [
        "before the folder is there",
        *(f"step {step}/9" for step in (1, 2, 3)),
        "ended by KeyError: 'gone'",
    ]
    assert "loss 2.0000" in texts[8] and len(texts) == 12 and lines[6] == ""


def test_the_log_of_a_workdir_that_another_run_has_taken_over_gets_no_line(tmp_path):
    lost: list[WorkdirLost] = []

    def check() -> None:
        if lost:
            raise lost[0]

    progress = Progress(9, None)
    progress.keep(tmp_path, check)
    progress.message("kept")
    before = (tmp_path / "run.log").read_bytes()
    lost.append(WorkdirLost("another run has taken over"))
    progress.message("after the takeover")
    Progress(9, None).keep(tmp_path, check)
    assert before.endswith(b"  kept\n") and (tmp_path / "run.log").read_bytes() == before


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    progress = Progress(9, None)
    progress.keep(tmp_path / "nowhere")
    progress.message("unkept")
