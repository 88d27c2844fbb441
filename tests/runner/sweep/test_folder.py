"""A sweep's folder: its points, their names, and folders that it refuses."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlib.runs.run import SWEEP
from runner.errors import ConfigError
from runner.sweep.folder import LONGEST, checked_folder, is_safe, names_of, planned, read_sweep

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
    with pytest.raises(ConfigError, match=r"sweep\.json cannot be read"):
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


def test_as_much_of_a_path_as_tells_it_from_others():
    points = [{"data.batch_size": "4", "validation.batch_size": "8"}]
    assert names_of(points) == ["data.batch_size=4,validation.batch_size=8"]


@given(settings_of_points)
def test_all_names_are_safe_and_different(points):
    names = names_of(points)
    assert len({name.casefold() for name in names}) == len(points)
    for name in names:
        assert is_safe(name) and len(name) <= LONGEST
        assert re.fullmatch(r"[\w.,=+-]+", name, re.ASCII) and name[0] not in ".-"


def test_what_is_there_keeps_its_name_and_no_other_takes_it():
    first = names_of([{"compute.dtype": "float32"}])
    assert first == ["dtype=float32"]
    (other,) = names_of([{"compute.dtype": "'float32'"}], taken=first)
    assert re.fullmatch(r"dtype=float32-[0-9a-f]{8}", other)
