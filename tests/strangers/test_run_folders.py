"""Folders of runs and sweeps from a stranger are read, or refused with the file's name."""

import json
import math
import shutil

import numpy as np
import pytest
from made_up_runs import leave_files as leave_texts
from made_up_runs import leave_run

from lmlib.checkpoint.folders import steps_in
from lmlib.report.page import page
from lmlib.report.seen import seen
from lmlib.report.terminal import view
from lmlib.runs import find_runs, read_run, runs
from lmlib.storage.unlinked import LinkError
from lmlib.verdicts.finished import finished_run, finished_runs
from lmlib.verdicts.ladder import ladder_of
from runner.command_line.paths import chosen_workdir
from runner.config import configs
from runner.config.references import resolve
from runner.errors import ConfigError
from runner.sweep.folder import read_sweep
from runner.sweep.training import last_line
from runner.training.report import finished_summary

STRANGE = (
    None, True, -1, 10**400, 1e308, math.nan, -math.inf, "text", "", "NaN", [], [1], {}, {"a": [1]},
    {"value": 1, "unit": 2}, {"validation_loss": {"value": "1", "unit": "nats"}},
    {"validation_loss": {"value": 10**400, "unit": "nats"}}, 
    {"starts": 1, "seconds": {"a": math.inf}},
)  # fmt: skip
POINT = {"name": "a", "settings": {"optimizer.peak_lr": "1e-3"}}


@pytest.fixture
def sweep(tmp_path):
    for name, loss in (("a", 2.0), ("b", 2.5)):
        leave_run(tmp_path / "sweep" / name, np.array([loss, loss]), {"peak_lr": loss}, steps=3)
        result = tmp_path / "sweep" / name / "result.json"
        result.write_text(
            json.dumps(
                json.loads(result.read_text()) | {"mean_mfu": None, "goodput": None, "samples": []}
            )
        )
    return tmp_path / "sweep"


def reading(place):
    """Everything that reads runs without JAX."""
    yield lambda: page(seen([place]))
    yield lambda: page(seen([place / "a"]))
    yield lambda: view(seen([place]), 80)
    yield lambda: runs(place)
    yield lambda: finished_runs(find_runs([place]), "validation_loss")
    yield lambda: finished_run(read_run(place / "a"), "validation_bits_per_byte")
    yield lambda: finished_run(read_run(place / "a"), "training_loss")
    yield lambda: ladder_of(find_runs([place]), "validation_loss")
    yield lambda: finished_summary(place / "a", 3)


def told(place):
    """Returns the messages of readers that refuse; raises any other error."""
    messages = []
    for read in reading(place):
        try:
            read()
        except (ValueError, OSError) as error:
            messages.append(str(error))
    return messages


def test_sound_files_are_read(sweep):
    (sweep / "sweep.json").write_text(json.dumps({"points": [POINT]}))
    assert [each for each in told(sweep) if "result.json" in each] == []


@pytest.mark.landing
@pytest.mark.parametrize("name", ["result.json", "validation.json", "goodput.json"])
def test_a_file_of_a_run_that_is_odd_is_named(sweep, name):
    file = sweep / "a" / name
    sound = json.loads(file.read_text()) if file.exists() else {"starts": []}
    odd = [*STRANGE, *({**sound, key: value} for key in sound for value in STRANGE)]
    if name == "validation.json":
        one = sound["sets"]["validation"]
        sets = ({**one, key: value} for key in one for value in STRANGE)
        odd += [{**sound, "sets": {"validation": each}} for each in sets]
    refused = 0
    for content in odd:
        file.write_text(json.dumps(content))
        messages = told(sweep)
        refused += any(str(file) in each for each in messages)
    assert refused > len(odd) / 4 or name == "goodput.json"  # which nothing needs


@pytest.mark.landing
def test_lines_of_metrics_that_are_odd_are_left_out(sweep):
    file = sweep / "a" / "metrics.jsonl"
    sound = [json.loads(line) for line in file.read_text().splitlines()]
    odd = [{**sound[0], key: value} for key in sound[0] for value in STRANGE]
    for entry in odd:
        file.write_text("".join(f"{json.dumps(each)}\n" for each in [*STRANGE, entry, *sound[1:]]))
        told(sweep)
        lines = read_run(sweep / "a").metrics
        assert [line["step"] for line in lines][-2:] == [2, 3]
        assert all(type(value) in (int, float, bool) for line in lines for value in line.values())


@pytest.mark.parametrize(
    "points",
    [
        *STRANGE,
        *([value] for value in STRANGE),
        *([{**POINT, key: value}] for key in POINT for value in STRANGE if value != {}),
        *([{"name": "a", "settings": {"optimizer.peak_lr": value}}, {**POINT, "name": "b"}]
          for value in STRANGE if not isinstance(value, str)),
    ],
)  # fmt: skip
def test_an_odd_sweep_says_nothing_of_its_points(sweep, points):
    (sweep / "sweep.json").write_text(
        json.dumps({"format": 2, "experiment": "e", "config": {}, "points": points})
    )
    if not (isinstance(points, list) and points and points[0] == {**POINT, "name": "text"}):
        frame = runs(sweep)
        assert list(frame["peak_lr"]) == [2.0, 2.5]
        if points and points not in ([{**POINT, "name": ""}], [{**POINT, "name": "NaN"}]):
            with pytest.raises(ConfigError, match=r"sweep\.json cannot be read"):
                read_sweep(sweep)


SECRET = "the-secret-of-this-machine"


@pytest.fixture
def linked(tmp_path):
    """A run with a file of another place in it, and that place."""
    (tmp_path / "secret.txt").write_text(f"{SECRET} = 1\n{SECRET} = 2\n")
    leave_texts(tmp_path / "run", {"steps": 2}, [{"step": 1, "loss": 2.0}], {}, {1: "a sample"})
    return tmp_path / "run"


@pytest.mark.parametrize(
    "name", ["settings.json", "metrics.jsonl", "result.json", "validation.json", "goodput.json"]
)
def test_no_file_of_a_run_is_read_through_a_link(linked, name):
    (linked / name).unlink(missing_ok=True)
    (linked / name).symlink_to(linked.parent / "secret.txt")
    read = {"validation.json": lambda: read_run(linked).validation}
    if name == "goodput.json":  # without which a page is whole
        assert SECRET not in page(seen([linked]))
        return
    with pytest.raises(LinkError, match=f"{linked / name} is a link, which is not followed"):
        read.get(name, lambda: page(seen([linked])))()


def test_a_workdir_may_be_a_link_and_its_checkpoints_and_config_may_not(linked, tmp_path):
    outside = tmp_path / "outside"
    (outside / "5").mkdir(parents=True)
    (linked / "checkpoints/4").mkdir(parents=True)
    (tmp_path / "link").symlink_to(linked)
    (tmp_path / "above").symlink_to(tmp_path)
    for place in (tmp_path / "link", tmp_path / "above" / "run"):
        assert steps_in(place / "checkpoints") == [4]
        assert chosen_workdir(str(place), allow_other_files=False) == place
        assert resolve(str(place)).folder == place / "checkpoints"
        assert "a sample" in page(seen([place]))
    (linked / "checkpoints/latest").symlink_to("4")  # its name is not a step
    assert steps_in(linked / "checkpoints") == [4]
    (linked / "checkpoints/5").symlink_to(outside / "5")
    with pytest.raises(LinkError, match="checkpoints/5 is a link"):
        steps_in(linked / "checkpoints")
    shutil.rmtree(linked / "checkpoints")
    (linked / "checkpoints").symlink_to(outside)
    for read in (resolve, lambda path: chosen_workdir(path, allow_other_files=False)):
        with pytest.raises(ConfigError, match=f"{linked}/checkpoints is a link"):
            read(str(linked))
    with pytest.raises(LinkError, match=f"{linked}/checkpoints is a link"):
        steps_in(linked / "checkpoints")
    (outside / "config.json").write_text(SECRET)
    (linked / "config.json").symlink_to(outside / "config.json")
    with pytest.raises(ConfigError, match=f"{linked}/config.json is a link"):
        configs.load(str(linked))
    (linked / "run.log").symlink_to(tmp_path / "secret.txt")
    assert last_line(linked / "run.log") == ""
