"""Runs are read from their folders, as the files say."""

import json
import math

import pytest

from lmlib.runs import find_runs, read_run, runs
from lmlib.runs.run import difference

CONFIG = """lmlib.experiment.Experiment
model: lmlib.models.families.llama.llama (partial)
model.embed = 64
optimizer.peak_lr = {rate}
steps = 2
"""


def leave_run(folder, rate, losses=(3.5, 2.5), result=None):
    folder.mkdir(parents=True)
    (folder / "config.txt").write_text(CONFIG.format(rate=rate))
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if result is not None:
        (folder / "result.json").write_text(result)


def test_a_run_says_what_was_set_and_measured(tmp_path):
    leave_run(tmp_path / "a", 0.001, (3.5, "NaN"), '{"steps": 2}')
    run = read_run(tmp_path / "a")
    assert run.settings["optimizer.peak_lr"] == "0.001"
    assert run.settings["model"] == "lmlib.models.families.llama.llama (partial)"
    steps, losses = run.series("loss")
    assert steps == [1, 2] and losses[0] == 3.5 and math.isnan(losses[1])
    assert run.last("validation_loss") is None
    assert run.finished and run.result == {"steps": 2}
    # It was made longer since, and has the result of its earlier end.
    with (tmp_path / "a" / "config.txt").open("a") as config:
        config.write("steps = 5\n")
    assert not read_run(tmp_path / "a").finished


def test_runs_are_found_below_a_folder_and_not_inside_each_other(tmp_path):
    leave_run(tmp_path / "sweep/b", 0.002)
    leave_run(tmp_path / "sweep/a", 0.001)
    leave_run(tmp_path / "sweep/a/profile/inner", 0.003)
    found = find_runs([tmp_path / "sweep", tmp_path / "sweep/a"])
    assert [run.name for run in found] == ["a", "b"]
    assert difference(found) == {"optimizer.peak_lr": ("0.001", "0.002")}


def test_points_of_a_sweep_differ_in_what_the_sweep_varies(tmp_path):
    """By its own names: that of a parameter of the experiment, from which others follow, too."""
    for name, rate in {"a": 0.001, "b": 0.002}.items():
        leave_run(tmp_path / name, rate)
    points = [
        {"name": "a", "settings": {"wide": "False", "optimizer.peak_lr": "1e-3"}},
        {"name": "b", "settings": {"wide": "True", "optimizer.peak_lr": "2e-3"}},
    ]
    found = find_runs([tmp_path])
    assert difference(found) == {"optimizer.peak_lr": ("0.001", "0.002")}
    (tmp_path / "sweep.json").write_text(json.dumps({"points": points}))
    expected = {"wide": ("False", "True"), "optimizer.peak_lr": ("0.001", "0.002")}
    assert difference(found) == expected
    (tmp_path / "sweep.json").write_text('{"points": [{"name": []}]}')
    assert difference(found) == {"optimizer.peak_lr": ("0.001", "0.002")}
    leave_run(tmp_path / "elsewhere/c", 0.003)
    assert list(difference([*found, read_run(tmp_path / "elsewhere/c")])) == ["optimizer.peak_lr"]


def test_a_place_without_runs_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"there is no run in {tmp_path}"):
        find_runs([tmp_path])
    with pytest.raises(ValueError, match="is no run's workdir"):
        read_run(tmp_path)


def test_damage_is_named(tmp_path):
    leave_run(tmp_path / "a", 0.001, result="[1]")
    with pytest.raises(ValueError, match=r"result.json is damaged: it holds no object"):
        _ = read_run(tmp_path / "a").result


def test_a_table_has_what_differs_and_the_last_values(tmp_path):
    leave_run(tmp_path / "a", 0.001, result="{}")
    leave_run(tmp_path / "b", 0.002, (4.0,))
    table = runs(tmp_path)
    assert list(table["optimizer.peak_lr"]) == [0.001, 0.002]
    assert list(table["loss"]) == [2.5, 4.0] and list(table["finished"]) == [True, False]
    assert list(runs(tmp_path, steps=True)["step"]) == [1, 2, 1]
