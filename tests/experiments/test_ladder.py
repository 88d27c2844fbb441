"""Sizes of the ladder's rungs."""

import math

import fiddle as fdl
import jax
import pytest

from experiments import ladder


def test_sizes_follow_from_depth():
    for depth in (4, 12, 24):
        cfg = ladder.config(depth, tokens_per_parameter=5)
        model, data = cfg.model, cfg.data
        assert (model.embed, model.layers, model.heads) == (64 * depth, depth, depth)
        make = fdl.build(model)
        shapes = jax.eval_shape(lambda make=make: make(key=jax.random.key(0)))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        step = data.batch_size * data.sequence_length
        assert cfg.steps * step == pytest.approx(5 * parameters, rel=0.01)
        assert 0.7 < step / math.sqrt(5 * parameters) < 1.5
        assert data.sequence_length == cfg.validation.sequence_length == 1_024
        rate, decay = cfg.optimizer.peak_lr, cfg.optimizer.weight_decay
        assert rate**2 * cfg.steps == pytest.approx(16e-3**2 * 200)
        assert rate * decay * cfg.steps == pytest.approx(2)
        base = cfg.scaling.base
        assert (base["embed"], base["layers"]) == (64, 4)
        assert base["embed"] // base["heads"] == model.embed // model.heads


def test_small_rungs_are_measured_on_rows_of_one_length():
    lengths = {
        ladder.config(depth, 4, 16, 128, vocab=1_024).validation.sequence_length for depth in (2, 6)
    }
    assert lengths == {128}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"depth": 0}, "depth must be at least 1"),
        ({"tokens_per_parameter": 0.0}, "tokens_per_parameter positive"),
        ({"width_per_layer": 48}, "must divide 64"),
    ],
)
def test_invalid_rungs_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ladder.config(**given)
