"""Points from flags and from an experiment's own function."""

import pytest

from runner.errors import ConfigError
from runner.sweep.points import check_paths, points_of

EXPERIMENT = """
from lmlib.sweeps import axis, product

def sweep():
    yield from product(axis("optimizer.peak_lr", 1e-3, 3e-3), axis("seed", 0, 1))

def wide():
    return axis("model.embed", 32, (1, "two"))

def wrong():
    return [{"model.embed": object()}]

def none():
    return []

def fails():
    return product(axis("seed", 1), axis("seed", 2))
"""


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    file = tmp_path_factory.mktemp("sweeps") / "experiment_with_sweeps.py"
    file.write_text(EXPERIMENT)
    return str(file)


def test_every_value_goes_with_every_other():
    found = points_of("unread", None, ["optimizer.peak_lr=1e-3, 3e-3", "seed=0,1"])
    rates = [(each["optimizer.peak_lr"], each["seed"]) for each in found]
    assert rates == [("0.001", "0"), ("0.001", "1"), ("0.003", "0"), ("0.003", "1")]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=(0.8, 0.9),(0.9, 0.99)", ["(0.8, 0.9)", "(0.9, 0.99)"]),
        ("a='x,y',z", ["'x,y'", "z"]),
        ("a={'mlp': 'int8', 'b': [1, 2]},None", ["{'mlp': 'int8', 'b': [1, 2]}", "None"]),
        ("a=1e-3,0.001", ["0.001"]),
        ("a=bfloat16,float32", ["bfloat16", "float32"]),
    ],
)
def test_commas_in_brackets_and_quotes_belong_to_a_value(text, values):
    assert [each["a"] for each in points_of("unread", None, [text])] == values


def test_an_experiment_has_points_of_its_own(experiment):
    assert points_of(experiment, None, []) == [
        {"optimizer.peak_lr": rate, "seed": seed} for rate in ("0.001", "0.003") for seed in "01"
    ]
    assert points_of(experiment, "wide", ["seed=5"]) == [
        {"model.embed": "32", "seed": "5"},
        {"model.embed": "(1, 'two')", "seed": "5"},
    ]
    assert points_of(experiment, None, ["seed=5"]) == [{"seed": "5"}]


@pytest.mark.parametrize(
    ("function", "axes", "told"),
    [
        ("other", [], r"has no function other\(\)"),
        ("wrong", [], "model.embed must be a Python literal, got <object"),
        ("none", [], "yields no points"),
        ("fails", [], "seed is set twice"),
        (None, ["seed"], "write it as --axis=optimizer.peak_lr=1e-3,3e-3"),
        (None, ["seed="], "write it as --axis="),
        (None, ["seed=1,,2"], "write it as --axis="),
        (None, ["seed=1", "seed=2"], "seed is set twice.*leave out an --axis"),
    ],
)
def test_what_is_no_sweep_is_refused(experiment, function, axes, told):
    with pytest.raises(ConfigError, match=told):
        points_of(experiment, function, axes)


def test_a_flag_may_not_set_what_the_points_do():
    check_paths([{"seed": "1"}], ["steps=3"])
    with pytest.raises(ConfigError, match=r"--fdl\.seed=… sets what the sweep does"):
        check_paths([{"seed": "1"}], ["steps=3", "seed=4"])
