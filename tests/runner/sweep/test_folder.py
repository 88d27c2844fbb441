"""What a sweep's folder remembers, and what it refuses."""

import pytest

from lmlib.runs.run import SWEEP
from runner.errors import ConfigError
from runner.sweep.folder import checked_folder, planned, read_sweep

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


def test_another_experiment_is_refused_with_what_differs(folder):
    with pytest.raises(ConfigError, match="differs in steps: give another --workdir"):
        plan(folder, [ONE, TWO], add=True, steps=200)


_BEGIN = '{"format": 2, "experiment": "e", "config": {"steps": "9"}, "points": '


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"format": 1}',
        _BEGIN.replace('"9"', "9") + '[{"name": "x", "settings": {}}]}',
        _BEGIN + "[]}",
        _BEGIN + '[{"name": "../x", "settings": {}}]}',
        _BEGIN + '[{"name": "x", "settings": 1}]}',
    ],
)
def test_a_damaged_file_is_refused(folder, content):
    (folder / SWEEP).write_text(content)
    with pytest.raises(ConfigError, match=r"sweep\.json cannot be read, or is damaged"):
        plan(folder, [ONE, TWO])


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
