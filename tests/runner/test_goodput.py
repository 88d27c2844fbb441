"""Where the wall time of a run went, over all of its starts."""

import dataclasses
import json
import math
import time

import pytest

from lmlib.runs.goodput import NOT_RUNNING, Goodput, Start, read_starts, total
from runner.monitoring.goodput import GoodputLog
from runner.monitoring.phases import Phase, Phases

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


def test_the_table_has_the_longest_first():
    lines = total([FIRST, SECOND]).text().splitlines()
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in lines]
    names = [row[0] for row in rows]
    order = ["wall time", "steps", "compile", "start-up", "not running", "repeated steps"]
    assert sorted(names) == sorted(order) and names[:3] == order[:3]
    assert rows[0][1:] == ["3 min 0 s", "in 2 starts"]
    assert rows[1][1:] == ["1 min 25 s", "47.2%"]


def test_phases_charge_every_second_to_one_of_them():
    before = time.time()
    phases = Phases(started=before - 5.0)
    with phases.during(Phase.COMPILE):
        with phases.during(Phase.DATA):
            assert phases.current[0] == Phase.DATA
        assert phases.current[0] == Phase.COMPILE
    assert phases.current[0] == Phase.STARTUP
    seconds = phases.seconds()
    assert seconds[Phase.STARTUP] >= 5.0
    assert sum(seconds.values()) == pytest.approx(time.time() - before + 5.0, abs=0.5)


def test_an_error_leaves_its_phase():
    phases = Phases()
    with pytest.raises(ValueError), phases.during(Phase.EVALUATION):
        raise ValueError
    assert phases.current[0] == Phase.STARTUP


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


STRANGE = (None, [], "9", -1, 1e300, math.nan, {"a": {}}, True)


@pytest.mark.parametrize("name", ["began", "until", "last_step", "seconds", "steps"])
def test_a_start_that_makes_no_sense_is_not_counted(tmp_path, name):
    """The others are, and it is told."""
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


def test_other_processes_write_nothing(tmp_path):
    with GoodputLog(tmp_path, Phases(), enabled=False) as log:
        log.update(3)
    assert list(tmp_path.iterdir()) == []


def test_nothing_at_all_is_no_division_by_zero():
    assert Goodput(1, dict.fromkeys([*map(str, Phase), NOT_RUNNING], 0.0)).fraction == 0.0
