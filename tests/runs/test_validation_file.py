"""validation.json keeps every sum to the bit, stays small, and is refused when it is damaged."""

import copy
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_experiment import small

from lmlib.runs import read_run
from lmlib.runs.validation import MOST, StoredSet, StoredValidation, read_validation
from runner import fit

FINITE = st.floats(allow_nan=False)


def stored(sums, counts=None, weight=None):
    counts = np.ones(len(sums), np.int64) if counts is None else counts
    one = StoredSet("1f", 4.5, weight, np.asarray(counts), {"loss": np.asarray(sums, np.float64)})
    return StoredValidation(20, "loss", {"validation": one})


@given(st.lists(FINITE | st.just(math.nan), min_size=1, max_size=20), st.none() | st.floats(0, 9))
def test_measurements_are_stored_exactly(tmp_path_factory, sums, weight):
    folder = tmp_path_factory.mktemp("run")
    before = stored(sums, np.arange(1, len(sums) + 1), weight)
    before.save(folder)
    after = read_validation(folder)
    assert (after.step, after.cross_entropy) == (20, "loss")
    one, other = before.sets["validation"], after.sets["validation"]
    assert (one.digest, one.bytes_per_target, one.weight) == ("1f", 4.5, weight)
    assert other.weight == weight and other.text_bytes == round(4.5 * one.counts.sum())
    np.testing.assert_array_equal(other.counts, one.counts)
    assert other.sums["loss"].tobytes() == np.array(sums).tobytes() or math.isnan(sum(sums))
    np.testing.assert_array_equal(other.sums["loss"], one.sums["loss"])


def test_neighbours_of_many_batches_are_added_up(tmp_path):
    sums = np.arange(2.0 * MOST + 5)
    stored(sums).save(tmp_path)
    one = read_validation(tmp_path).sets["validation"]
    assert len(one.counts) <= MOST and one.counts[0] == 3
    assert one.sums["loss"][:2].tolist() == [0 + 1 + 2, 3 + 4 + 5]
    assert one.sums["loss"].sum() == sums.sum() and one.counts.sum() == len(sums)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: "[]",
        lambda text: text.replace('"counts": [1, 1]', '"counts": [1]'),
        lambda text: text.replace('"counts": [1, 1]', '"counts": [1, -1]'),
        lambda text: text.replace('"counts": [1, 1]', '"counts": [0, 0]'),
        lambda text: text.replace('"step": 20', '"step": null'),
        lambda text: text.replace("2.0]", '"many"]'),
        lambda text: text.replace("2.0]", "[2.0]]"),
    ],
)
def test_damage_is_named(tmp_path, damage):
    stored([1.0, 2.0]).save(tmp_path)
    file = tmp_path / "validation.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(ValueError, match=f"{file} is damaged"):
        read_validation(tmp_path)


@pytest.mark.slow
def test_a_run_leaves_what_its_loss_is_made_of(tmp_path):
    """Two runs on the same batches have one digest, for any training data."""
    found = {}
    for seed in (0, 1):
        cfg = small("steps=1", f"seed={seed}", f"data.seed={seed}", "evaluation.batches=3")
        cfg.validation = copy.deepcopy(cfg.data)
        cfg.validation.seed = 7
        fit(cfg, tmp_path / str(seed))
        run = read_run(tmp_path / str(seed))
        one = run.validation.sets["validation"]
        assert len(one.counts) == 3 and run.validation.step == 1
        loss = sum(one.sums["loss"].tolist()) / one.counts.sum()
        assert loss == run.result["validation"]["validation_loss"]["value"]
        found[seed] = one
    assert found[0].digest == found[1].digest
    assert found[0].sums["loss"].tolist() != found[1].sums["loss"].tolist()
