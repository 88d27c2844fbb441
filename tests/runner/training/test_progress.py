"""Progress of a run, and its wall time by phase."""

import dataclasses
import io
import json
import math
import os
import re
import threading
import time

import pytest

from lmlib.runs.goodput import NOT_RUNNING, Start, read_starts, total
from runner.monitoring.goodput import GoodputLog
from runner.monitoring.phases import Phase, Phases
from runner.monitoring.progress import Progress
from runner.monitoring.progress_line import ProgressLine


class Clock:
    """A clock that only the test advances."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


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


class Terminal(io.StringIO):
    """A terminal that does not tell its width."""

    def isatty(self):
        return True

    def fileno(self):
        raise OSError("closed")


def test_the_live_line_is_redrawn_below_messages():
    clock, stream = Clock(), Terminal()
    with Progress(steps=4, stream=stream, clock=clock) as progress:
        progress.message("compiled")
        progress.update(1, loss=12.5, seconds=1.0, tokens_per_second=123_456.0)
        clock.seconds = 30.0
        progress.message("saved\nstep 1")
        progress.update(2, loss=2.5, seconds=1.0, tokens_per_second=1e3)
    assert screen(stream.getvalue()) == [
        "compiled",
        "saved",
        "step 1",
        "[==========          ] step 2/4  loss 2.5000  1.00 k tokens/s  0:01:00 left",
        "",
    ]


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


class Seen(io.StringIO):
    """A stream that says when something was written to it for the third time."""

    def __init__(self):
        super().__init__()
        self.writes, self.enough = 0, threading.Event()

    def write(self, text):
        self.writes += 1
        if self.writes == 3:
            self.enough.set()
        return super().write(text)


def test_a_line_follows_now_and_then_where_there_is_no_terminal():
    stream = Seen()
    with ProgressLine(stream, seconds=1e-3) as tell:
        tell("compiling the step")
        assert stream.enough.wait(timeout=60)
    first, *others = stream.getvalue().splitlines()
    assert first.startswith("[  0.") and first.endswith(" s] compiling the step")
    assert len(others) >= 2
    assert all(line.endswith("] compiling the step: 0 s so far") for line in others)


FIRST = Start(100.0, 160.0, 40, {"start-up": 10.0, "compile": 20.0, "steps": 30.0})
SECOND = Start(
    180.0, 280.0, 60, {"start-up": 10.0, "compile": 20.0, "repeated steps": 15.0, "steps": 55.0}
)


def test_starts_add_up_to_the_wall_time():
    found = total([FIRST, SECOND])
    assert found.starts == 2
    assert sum(found.seconds.values()) == pytest.approx(280.0 - 100.0)
    assert found.seconds[NOT_RUNNING] == 20.0
    assert found.seconds[Phase.STEP] == 85.0
    assert found.seconds[Phase.REPEATED] == 15.0
    assert found.fraction == pytest.approx(85 / 180)


def test_the_log_goes_on_with_what_earlier_starts_left(tmp_path):
    began = time.time() - 100_000.0
    first = {"began": began, "until": began + 9.0, "last_step": 7, "seconds": {"steps": 9.0}}
    (tmp_path / "goodput.json").write_text(json.dumps({"starts": [first]}))
    with GoodputLog(tmp_path, Phases()) as log:
        assert log.problem is None
        assert log.furthest == 7
        assert log.update(8) == pytest.approx(9.0 / 100_000.0, rel=1e-3)
    with GoodputLog(tmp_path, Phases()) as log:
        assert log.furthest == 8
        assert log.total().starts == 3
    assert [start.last_step for start in read_starts(tmp_path)[0]] == [7, 8, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["goodput.json"]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", '{"starts": 7}', '{"starts": [{}]}', '{"starts": [7]}', "\0" * 9],
)
def test_a_damaged_file_is_begun_anew(tmp_path, content):
    (tmp_path / "goodput.json").write_text(content)
    with GoodputLog(tmp_path, Phases()) as log:
        assert str(tmp_path / "goodput.json") in log.problem
        assert log.furthest == 0
        log.update(3)
    assert [start.last_step for start in read_starts(tmp_path)[0]] == [3]


STRANGE = (None, "9", -1, math.nan, {"a": {}}, True)


@pytest.mark.parametrize("name", ["began", "until", "last_step", "seconds", "steps"])
def test_a_start_that_makes_no_sense_is_not_counted(tmp_path, name):
    """All others are shown, and a message names it."""
    sound = dataclasses.asdict(FIRST)
    starts = [sound]
    for value in STRANGE:
        changed = {"seconds": {"steps": value}} if name == "steps" else {name: value}
        starts.append(sound | changed)
    starts.append({key: value for key, value in sound.items() if key != name or name == "steps"})
    counted = [start for start in starts if start == sound]
    (tmp_path / "goodput.json").write_text(json.dumps({"starts": starts}))
    with GoodputLog(tmp_path, Phases()) as log:
        assert f"{len(starts) - len(counted)} of {len(starts)} starts are damaged" in log.problem
        assert log.total().starts == len(counted) + 1


@pytest.mark.parametrize("jump", [-1e9, -3_600.0, 1e9], ids=["1990s", "an hour back", "2050s"])
def test_a_clock_that_is_set_makes_no_goodput(tmp_path, monkeypatch, jump):
    """Neither while a start lasts nor between two: it stays a fraction of the time that passed."""
    phases, real = Phases(), time.time
    phases.enter(Phase.STEP)
    with GoodputLog(tmp_path, phases) as log:
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        assert 0 <= log.update(1) <= 1
    (start,), _ = read_starts(tmp_path)
    assert start.until - start.began == pytest.approx(sum(start.seconds.values()), abs=1e-3)
    with GoodputLog(tmp_path, Phases()) as log:
        assert 0 <= log.update(2) <= 1
        assert log.total().seconds[NOT_RUNNING] == 0.0
