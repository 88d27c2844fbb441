"""The view in a terminal says what the page says."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from left_runs import leave_run, losses

from lmlib.report.seen import Watched
from lmlib.report.terminal import bars, view
from lmlib.runs.series import Series


def series(*values):
    return Series(np.arange(1, len(values) + 1), np.array(values, np.float64))


def test_bars_go_from_the_least_to_the_greatest():
    assert bars(series(0, 1, 2, 3, 4, 5, 6, 7), 8) == "▁▂▃▄▅▆▇█"
    assert bars(series(5, math.nan, 1), 8) == "█×▁"
    assert bars(series(2, 2), 8) == "▁▁"
    assert bars(series(math.inf), 8) == "×"


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=300), st.integers(2, 50))
def test_bars_are_no_wider_than_there_is_room(values, most):
    assert 1 <= len(bars(series(*values), most)) <= max(most, 2)


def test_a_view_keeps_up_with_a_run(tmp_path):
    run = leave_run(tmp_path / "a\x1b[2J", {"steps": 9}, losses(3.0, 2.0))
    watched = Watched([run])
    assert "step 2 of 9" in view(watched.now(), 80)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.5}\n')
    lines = view(watched.now(), 80).splitlines()
    assert lines[0] == "a\\x1b[2J  not running, step 3 of 9"
    assert lines[2].split() == ["loss", "1.5", "1.5", "3", "█▃▁"]
