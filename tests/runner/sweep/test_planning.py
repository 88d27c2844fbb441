"""The points of a sweep: values, names, folder, commands and halving."""

import io
import json
import re
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import ConfigError
from runner.sweep.commands import check_launcher, command_of, launched, write_script
from runner.sweep.folder import (
    LONGEST,
    Point,
    checked_folder,
    is_safe,
    names_of,
    planned,
    read_sweep,
)
from runner.sweep.halving import halved, parsed_rungs
from runner.sweep.points import points_of
from runner.sweep.training import Total

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
        ("wrong", [], "model.embed must be a Python literal, got <object "),
        ("none", [], "yields no points"),
        ("fails", [], "seed is set twice"),
        (None, ["seed"], "write it as --axis=optimizer.peak_lr=1e-3,3e-3"),
        (None, ["seed="], "write it as --axis="),
        (None, ["seed=1,,2"], "write it as --axis="),
        (None, ["seed=1", "seed=2"], "seed is set twice.*leave out an --axis"),
    ],
)
def test_invalid_sweeps_are_refused(experiment, function, axes, told):
    with pytest.raises(ConfigError, match=told):
        points_of(experiment, function, axes)


ONE, TWO, THREE = ({"seed": str(seed)} for seed in (1, 2, 3))


def plan(folder, points, add=False, steps=100):
    def config_of(point):
        return {"steps": str(steps), **point}

    return planned(folder, "experiments/quickstart", points, config_of, add)


@pytest.fixture
def folder(tmp_path):
    plan(tmp_path / "sweep", [ONE, TWO]).write()
    return tmp_path / "sweep"


def test_the_same_points_are_the_same_sweep_in_any_order(folder):
    again = plan(folder, [TWO, ONE])
    assert again == read_sweep(folder)
    assert [each.name for each in again.points] == ["seed=1", "seed=2"]
    assert [each.workdir for each in again.points] == [folder / "seed=1", folder / "seed=2"]


def test_other_points_are_refused_and_named(folder):
    with pytest.raises(ConfigError, match="2 points, and this command is missing seed=2 and has"):
        plan(folder, [ONE, THREE])
    with pytest.raises(ConfigError, match="has seed=3: give the same points, --add_points"):
        plan(folder, [ONE, TWO, THREE])


def test_points_can_be_added_and_what_is_there_stays(folder):
    plan(folder, [THREE, TWO], add=True).write()
    assert [each.name for each in read_sweep(folder).points] == ["seed=1", "seed=2", "seed=3"]
    # A path whose last part is another's too: the names that are there stay all the same.
    both = [{"seed": "1", "data.seed": "1"}]
    assert [each.name for each in plan(folder, both, add=True).points] == [
        "seed=1", "seed=2", "seed=3", "seed=1,data.seed=1",
    ]  # fmt: skip


def test_a_folder_of_something_else_is_refused(tmp_path, folder):
    assert checked_folder(str(folder)) == folder
    assert checked_folder(str(tmp_path / "new")) == tmp_path / "new"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds thesis.tex, and no sweep\.json"):
        checked_folder(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="is a file"):
        checked_folder(str(tmp_path / "other" / "thesis.tex"))
    with pytest.raises(ConfigError, match="is a URL"):
        checked_folder("gs://bucket/sweep")
    with pytest.raises(ConfigError, match="give --workdir"):
        checked_folder(None)


PATHS = ["seed", "optimizer.peak_lr", "model.a.dim", "model.b.dim", "optimizer.betas[1]"]
texts = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.integers().map(repr),
    st.text(st.sampled_from("aB1/ .,=-\0é"), max_size=150),
)
settings_of_points = st.lists(
    st.dictionaries(st.sampled_from(PATHS), texts, max_size=4),
    min_size=1,
    max_size=8,
    unique_by=lambda point: tuple(sorted(point.items())),
)


def test_a_name_says_what_differs():
    points = [{"optimizer.peak_lr": "0.001", "seed": "0"}, {"compute.dtype": "'bfloat16'"}, {}]
    assert names_of(points) == ["peak_lr=0.001,seed=0", "dtype=bfloat16", "base"]


@given(settings_of_points)
def test_all_names_are_safe_and_different(points):
    names = names_of(points)
    assert len({name.casefold() for name in names}) == len(points)
    for name in names:
        assert is_safe(name) and len(name) <= LONGEST
        assert re.fullmatch(r"[\w.,=+-]+", name, re.ASCII) and name[0] not in ".-"


def test_existing_points_keep_their_unique_names():
    first = names_of([{"compute.dtype": "float32"}])
    assert first == ["dtype=float32"]
    (other,) = names_of([{"compute.dtype": "'float32'"}], taken=first)
    assert re.fullmatch(r"dtype=float32-[0-9a-f]{8}", other)


@pytest.fixture
def point(tmp_path):
    return Point(tmp_path / "a folder" / "x=1", {"model.kind": "'a b'", "seed": "1"})


def test_a_command_is_one_that_a_user_would_type(point):
    words = command_of(point, ["--fdl_config=experiments/quickstart"], ["--deterministic"])
    assert words == [
        sys.executable, "-m", "runner", "--fdl_config=experiments/quickstart",
        "--fdl.model.kind='a b'", "--fdl.seed=1", f"--workdir={point.workdir}", "--deterministic",
    ]  # fmt: skip


def test_a_template_takes_the_command_as_words_or_as_one(point):
    command = ["python", "-c", "print('it is')"]
    assert launched("env GPU={slot} {command}", command, point, 3) == ["env", "GPU=3", *command]
    words = launched("sh -c 'echo {name}; {command}'", command, point, 0)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "x=1\nit is\n"
    assert launched("{command} > {workdir}", [], point, 0) == [">", str(point.workdir)]


@pytest.mark.parametrize("template", ["srun", "", "sh -c 'unfinished {command}"])
def test_a_template_without_a_command_is_refused(template):
    with pytest.raises(ConfigError, match="--launcher="):
        check_launcher(template)


def test_each_task_of_an_array_runs_its_own_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/some where")
    told = "import os; print(os.environ['PYTHONPATH'], os.getcwd())"
    commands = [[sys.executable, "-c", f"print({i}); {told}"] for i in range(3)]
    file = write_script(tmp_path, commands, 2, ["--gres=gpu:1"])
    lines = file.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --array=0-2%2", "#SBATCH --gres=gpu:1", "#SBATCH --ntasks=1"} <= set(lines)
    assert (tmp_path / "output").is_dir()
    for i in range(3):
        done = subprocess.run(
            ["bash", file],
            cwd="/",
            env={"SLURM_ARRAY_TASK_ID": str(i)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{i}\n/some where {tmp_path}\n"
    assert all(shlex.join(words) in file.read_text() for words in commands)


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


def test_failed_and_diverged_points_are_left_behind(tmp_path):
    def losses(name, step):
        return float("nan") if name in "bcd" else 1.0

    left, trained = made(tmp_path, losses, broken="a")
    assert trained[0] == "abcdefg"
    assert set(trained[1]) == set("efg")  # of six that were compared
    assert len(left) == 2


def test_fractions_rise_between_nothing_and_all():
    assert parsed_rungs("0.25,0.5") == [0.25, 0.5]
    for text in ("", "a", "0.5,0.25", "0,0.5", "0.5,1", "0.5,0.5", "nan"):
        with pytest.raises(ConfigError, match="give rising fractions"):
            parsed_rungs(text)


def test_a_terminal_shows_a_line_for_each_ended_point_above_a_bar(tmp_path):
    stream, seconds = io.StringIO(), iter(range(1_000))
    stream.isatty = lambda: True
    points = [Point(tmp_path / name, {}) for name in "ab"]
    total = Total(stream, lambda: next(seconds))
    with total.of(points):
        total.step(points[0], 0, 10)
        total.step(points[0], 5, 10)
        drawn = stream.getvalue().split("\r\x1b[K")
        total.ended(points[0], {"a": "no room"}, 0.0)
    assert drawn[0] == "" and drawn[2:] == [
        f"[{' ' * 20}] 0/2 points  a  step 0/10",
        f"[{'=' * 5}{' ' * 15}] 0/2 points  a  step 5/10",
    ]
    _, line, bar, erased = stream.getvalue().removeprefix("\r\x1b[K".join(drawn)).split("\r\x1b[K")
    ended, below = line.split("\n")
    assert re.fullmatch(r"1/2  a failed after \d+\.0 s: no room", ended)
    assert below == drawn[3] and re.match(r"\[={10} {10}\] 1/2 points  \d+\.0 s left", bar)
    assert erased == ""
