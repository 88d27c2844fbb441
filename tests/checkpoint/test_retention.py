"""Which checkpoints stay."""

import math

import jax
import jax.numpy as jnp
import pytest

from lmlib.checkpoint import Checkpoints
from lmlib.checkpoint.manifest import MANIFEST

STATE = {"weight": jnp.ones(4)}


def save_all(directory, metrics: dict[int, float | None], **keeping) -> list[int]:
    with Checkpoints(directory, **keeping) as checkpoints:
        for step, metric in metrics.items():
            assert checkpoints.save(step, STATE, {}) > 0
            if metric is not None:
                checkpoints.rank(step, metric)
        checkpoints.wait()
        return checkpoints.steps()


def test_the_newest_and_every_so_many_steps(tmp_path):
    steps = dict.fromkeys(range(10, 80, 10))
    assert save_all(tmp_path, steps, keep=2, keep_every=30) == [30, 60, 70]


def test_the_best_stay_also_over_a_restart(tmp_path):
    assert save_all(tmp_path, {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}, keep=1, keep_best=2) == [2, 3, 4]
    assert save_all(tmp_path, {5: 1.5, 6: 9.0}, keep=1, keep_best=2) == [2, 5, 6]


def test_equally_good_ones_the_newer_stays(tmp_path):
    assert save_all(tmp_path, {1: 1.0, 2: 1.0, 3: 2.0}, keep=1, keep_best=1) == [2, 3]


def test_what_is_held_stays_until_it_is_not_held(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step, hold in ((1, None), (2, 1), (3, 1), (4, 1)):
            checkpoints.save(step, STATE, {}, hold=hold)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, STATE, {}, hold=1)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 5]
        checkpoints.save(6, STATE, {})
        checkpoints.wait()
        assert checkpoints.steps() == [6]


def test_a_ranked_checkpoint_is_sound_and_one_that_was_never_saved_is_left_alone(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, {})
        checkpoints.rank(1, 2.5)
        checkpoints.rank(2, 1.5)
        assert checkpoints.verify(1).metric == 2.5
        assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize("none", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_never_best(tmp_path, none):
    assert save_all(tmp_path, {1: 5.0, 2: none, 3: none, 4: None}, keep=1, keep_best=1) == [1, 4]


def test_a_best_one_whose_manifest_is_gone_does_not_stop_a_run(tmp_path):
    save_all(tmp_path, {1: 1.0, 2: 2.0}, keep=1, keep_best=1)
    (tmp_path / "1" / MANIFEST).unlink()
    assert save_all(tmp_path, {3: 3.0}, keep=1, keep_best=1) == [2, 3]


@pytest.mark.parametrize(
    "keeping", [{"keep": 0}, {"keep": 1, "keep_every": 0}, {"keep": 1, "keep_best": -1}]
)
def test_numbers_that_keep_nothing_are_refused(tmp_path, keeping):
    name, value = list(keeping.items())[-1]
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Checkpoints(tmp_path / "new", **keeping)
    assert not (tmp_path / "new").exists()


def test_notes_are_copied_and_must_be_json(tmp_path):
    notes = {"data": {"position": 1}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, notes)
        notes["data"]["position"] = 2  # while it is saved
        checkpoints.wait()
        sharding = STATE["weight"].sharding
        target = {"weight": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)}
        assert checkpoints.restore(1, target)[1] == {"data": {"position": 1}}
        with pytest.raises(ValueError, match=r"the notes cannot be saved as JSON: .*object is not"):
            checkpoints.save(2, STATE, {"data": object()})
