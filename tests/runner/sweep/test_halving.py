"""Which points go on, beside losses made up for each."""

import json

import pytest

from runner.errors import ConfigError
from runner.sweep.folder import Point
from runner.sweep.halving import halved, parsed_rungs

STEPS = 1_000


def made(tmp_path, losses, broken=()):
    """Points whose loss at each step is `losses` of (name, step), trained as they are asked for."""
    points = [Point(tmp_path / name, {}) for name in "abcdefg"]
    trained = []

    def train(behind, last):
        trained.append("".join(each.name for each in behind))
        for point in behind:
            if point.name in broken:
                continue
            point.workdir.mkdir(exist_ok=True)
            lines = [
                {"step": step, "loss": losses(point.name, step)}
                for step in range(1, last(point) + 1)
            ]
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (point.workdir / "metrics.jsonl").write_text(text)
        return True

    left = halved(points, lambda point: STEPS, [0.1, 0.5], train, lambda line: None)
    return "".join(each.name for each in left), trained


def test_the_better_half_goes_on_by_the_loss_so_far(tmp_path):
    # g is best at first, and worst at the second look.
    def losses(name, step):
        late = {"g": 9.0, "f": 1.0, "e": 2.0, "d": 3.0}
        return late[name] if step > 100 and name in late else ord("z") - ord(name)

    left, trained = made(tmp_path, losses)
    assert (left, trained[0], set(trained[1])) == ("fe", "abcdefg", set("defg"))
    # Again, as after a kill: nothing is trained that was.
    assert made(tmp_path, losses) == ("fe", ["", ""])


def test_what_fails_or_diverges_is_left_behind(tmp_path):
    def losses(name, step):
        return float("nan") if name in "bcd" else 1.0

    left, trained = made(tmp_path, losses, broken="a")
    assert trained[0] == "abcdefg"
    assert set(trained[1]) == set("efg")  # of six that were compared
    assert len(left) == 2


def test_a_signal_ends_it(tmp_path):
    points = [Point(tmp_path / "a", {})]
    assert halved(points, lambda point: 10, [0.5], lambda *given: False, print) == []


def test_fractions_rise_between_nothing_and_all():
    assert parsed_rungs("0.25,0.5") == [0.25, 0.5]
    for text in ("", "a", "0.5,0.25", "0,0.5", "0.5,1", "0.5,0.5", "nan"):
        with pytest.raises(ConfigError, match="rising, between 0 and 1"):
            parsed_rungs(text)
