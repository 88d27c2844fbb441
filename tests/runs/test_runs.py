"""Runs are read from their folders, as the files say."""

import json
import math

import pytest
from made_up_runs import leave_files, losses

from lmlib.runs import find_runs, read_run, runs
from lmlib.runs.run import difference

MODEL = {"model": "lmlib.models.families.llama.llama (partial)", "model.embed": "64"}


def leave_run(folder, rate, found=(3.5, 2.5), result=None, **settings):
    settings = {**MODEL, "optimizer.peak_lr": rate, "steps": 2, **settings}
    leave_files(folder, settings, losses(*found), result)


def test_a_run_says_what_was_set_and_measured(tmp_path):
    leave_run(tmp_path / "a", 0.001, (3.5, "NaN"), {"steps": 2})
    run = read_run(tmp_path / "a")
    assert run.settings["optimizer.peak_lr"] == "0.001"
    assert run.settings["model"] == "lmlib.models.families.llama.llama (partial)"
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert run.metrics[0]["loss"] == 3.5 and math.isnan(run.metrics[1]["loss"])
    assert run.finished and run.result == {"steps": 2}
    # It was made longer since, and has the result of its earlier end.
    (tmp_path / "a/settings.json").write_text(json.dumps(MODEL | {"steps": "5"}))
    assert not read_run(tmp_path / "a").finished


def test_a_run_is_described_in_a_line_and_in_a_table(tmp_path):
    validation = {"validation_loss": {"value": 2.25, "unit": "nats per token"}}
    result = {"steps": 2, "parameters": 4_210_000, "training_loss": 2.5, "validation": validation}
    leave_run(tmp_path / "<a>", 0.001, result=result)
    leave_run(tmp_path / "b", 0.002, steps=2_000)
    leave_run(tmp_path / "c", 0.003, result={"steps": []})
    done, stopped, damaged = find_runs([tmp_path])
    loss = "validation loss 2.2500 nats per token"
    assert repr(done) == f"Run(<a>: finished, step 2, 4.21 M parameters, {loss})"
    assert repr(stopped) == "Run(b: not running, step 2 of 2000, training loss 2.5000)"
    assert repr(damaged).startswith(f"Run(c: damaged: {tmp_path}/c/result.json is damaged: steps")
    table = done._repr_html_()
    assert "&lt;a&gt;" in table and "<a>" not in table
    assert "<tr><th>validation_loss</th><td>2.25 nats per token</td></tr>" in table
    assert "<td>4,210,000</td>" in table and "damaged" in damaged._repr_html_()


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


def test_a_place_without_runs_and_damaged_settings_are_named(tmp_path):
    with pytest.raises(ValueError, match=f"there is no run in {tmp_path}"):
        find_runs([tmp_path])
    with pytest.raises(ValueError, match="is not a workdir of a run"):
        read_run(tmp_path)
    leave_run(tmp_path / "a", 0.001)
    for damage in ("[]", '{"steps": 2}', '{"a": "1", "a": "2"}', "steps = 2"):
        (tmp_path / "a/settings.json").write_text(damage)
        with pytest.raises(ValueError, match=r"a/settings\.json is damaged: "):
            _ = read_run(tmp_path / "a").settings


def test_settings_keep_their_kinds_in_a_table(tmp_path):
    """Beside numbers `None` is neither a text nor a missing number; a setting may be absent."""
    texts = {"clip": ("None", "0.5"), "name": ("'None'", '"it\'s"'), "on": ("True", "False"),
             "size": ("(1, 2)", "nan"), "data.sources['web text'].weight": ("1", "2")}  # fmt: skip
    values = {"clip": [None, 0.5], "name": ["None", "it's"], "on": [True, False],
              "data.sources['web text'].weight": [1, 2]}  # fmt: skip
    for number in (0, 1):
        settings = {path: each[number] for path, each in texts.items()}
        leave_run(tmp_path / f"{number}", 0.001, **settings)
    table = runs(tmp_path)
    for path, expected in values.items():
        assert table[path].tolist() == table[path].to_numpy().tolist() == expected
    assert table["size"][0] == "(1, 2)" and math.isnan(table["size"][1])
    leave_run(tmp_path / "2", 0.001)
    assert runs(tmp_path)["clip"].tolist()[:2] == [None, 0.5]
    assert math.isnan(runs(tmp_path)["clip"][2])


def test_a_table_has_what_differs_and_the_last_values(tmp_path):
    leave_run(tmp_path / "a", 0.001, result={})
    leave_run(tmp_path / "b", 0.002, (4.0,))
    table = runs(tmp_path)
    assert list(table["optimizer.peak_lr"]) == [0.001, 0.002]
    assert list(table["loss"]) == [2.5, 4.0] and list(table["finished"]) == [True, False]
    assert list(runs(tmp_path, steps=True)["step"]) == [1, 2, 1]
