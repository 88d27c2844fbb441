"""`runner.compare` and `runner.ladder` as the user types them."""

import json
import re
import subprocess

import pytest
from forked_processes import fresh_process, run_forked
from made_up_runs import leave_run
from sentinels import sentinels


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for rate, loss in ((0.001, 3.0), (0.003, 2.9)):
        for seed in range(3):
            off = 0.01 * seed * (1 + 2 * rate)
            settings = {"optimizer.peak_lr": rate, "seed": seed}
            leave_run(folder / f"sweep/{rate}_{seed}", loss + off, settings)
    for n in (2e7, 4e7, 8e7):
        for ratio in (5, 20, 80):
            loss = 1.8 + 480 * n**-0.35 + 2085 * (n * ratio) ** -0.37
            settings = {"model.embed": int(n), "data.batch_size": ratio}
            sizes = {"parameters": int(n), "tokens": int(n * ratio), "steps": 10}
            leave_run(folder / f"ladder/{n:.0f}_{ratio}", loss, settings, **sizes)
    return folder


def test_a_sweep_is_compared_in_a_table_and_as_json(places):
    arguments = ("sweep", "--baseline=optimizer.peak_lr=1e-3", "--margin=0.01", "--json=out.json")
    ended = run_forked("-m", "runner.compare", *arguments, cwd=places)
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert lines[0][0] == "optimizer.peak_lr" and lines[1][0] == "0.003" and "better" in lines[1]
    assert lines[2][0] == "0.001" and "baseline" in lines[2]
    content = json.loads((places / "out.json").read_text())
    assert [each["is_baseline"] for each in content["groups"]] == [False, True]
    assert content["margin"] == 0.01


def test_a_ladder_is_fitted_in_a_table_and_as_json(places):
    arguments = ("ladder", "--budget=1e19", "--json=law.json")
    ended = run_forked("-m", "runner.ladder", *arguments, cwd=places)
    assert ended.returncode == 0, ended.stderr
    assert "L = E + A/N^α + B/D^β, fitted to 9 runs" in ended.stdout
    assert "Best for 1e+19 FLOPs" in ended.stdout and "WARNING" not in ended.stdout
    numbers = json.loads((places / "law.json").read_text())["numbers"]
    expected = {"E": 1.8, "A": 480, "B": 2085, "α": 0.35, "β": 0.37}
    found = {name: each["value"] for name, each in numbers.items()}
    assert found == pytest.approx(expected, rel=1e-2)


def test_an_end_on_which_the_runs_set_no_bound_is_null(places, tmp_path):
    """The loss falls once, and wavers: any greater scale would do with a greater exponent."""
    for number, loss in enumerate([4, 3.1, 3.0, 3.05, 2.97, 3.02]):
        sizes = {"parameters": 10**7, "tokens": 10**8 * 2**number, "steps": 10}
        leave_run(tmp_path / f"{number}", loss, {"data.batch_size": 2**number}, **sizes)
    ended = run_forked("-m", "runner.ladder", tmp_path, "--json=law.json", cwd=places)
    assert ended.returncode == 0, ended.stderr
    assert re.search("^B .* to inf$", ended.stdout, re.MULTILINE), ended.stdout
    assert json.loads((places / "law.json").read_text())["numbers"]["B"]["high"] is None


@pytest.mark.parametrize(
    ("command", "told"),
    sentinels(
        [
            (("compare",), "give runs or folders of runs"),
            (("compare", "nowhere"), "there is no run in nowhere"),
            (("compare", "sweep", "--baseline=x=1"), "give --baseline and --margin together"),
            (("compare", "sweep", "--margin=1"), "give --baseline and --margin together"),
            (
                ("compare", "sweep", "--baseline=x=1", "--margin=0"),
                "'x' is none of the settings",
            ),
            (("compare", "sweep", "--baseline=x=1", "--margin=-1"), "--margin=-1"),
            (
                ("compare", "sweep", "--metric=accuracy"),
                "no run can be compared: .* has no accuracy",
            ),
            (("compare", "sweep", "--json=no/where.json"), "no/where.json"),
            (("ladder",), "give runs or folders of runs"),
            (("ladder", "sweep"), "all runs have the same parameters and tokens"),
        ],
        lambda case: case[0] in (("compare", "nowhere"), ("ladder", "sweep")),
    ),
)
def test_mistakes_are_told_in_a_sentence(places, command, told):
    name, *arguments = command
    ended = run_forked("-m", f"runner.{name}", *arguments, cwd=places)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(told, line), line


def test_a_law_that_is_refused_names_the_runs_that_it_lacks(places, tmp_path):
    for number in range(4):
        finished = number < 2
        sizes = {"parameters": 10**7 * (1 + number), "finished": finished}
        leave_run(tmp_path / f"{number}", 3.0, {"model.embed": number}, **sizes)
    ended = run_forked("-m", "runner.ladder", tmp_path, cwd=places)
    assert ended.returncode == 2 and "E, A and α are not identified" in ended.stderr
    assert f"{tmp_path}/3 has not finished" in ended.stderr


@pytest.mark.landing
@pytest.mark.parametrize("name", ["compare", "ladder"])
def test_they_need_no_jax(places, name):
    code = f"import sys, runner.{name}; print({{'jax', 'jaxlib', 'equinox'}} & {{*sys.modules}})"
    ended = fresh_process("-c", code, cwd=places, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ended.communicate()[0].decode().strip() == "set()"
