"""Record 89's sizes, stages and rates, against its `train_gpt.py`."""

import fiddle as fdl
import jax
import pytest

from experiments import modded_124m
from lmlib.optim.stage_rates import stage_rates
from runner import fit
from runner.config import configs
from runner.training.options import Options

V, E, H, LAYERS = 50_304, 768, 6, 11


def test_it_has_the_parameters_of_the_record_without_those_it_does_not_use():
    bigrams, values, embed_and_head = V * 15 // 2 * E, 5 * V * E, 2 * V * E
    matrices = 64 * 256 * E + 24 * E * E + 12 * 2 * 4 * E * E  # its banks
    mudd = 2 * 64 * E + 2 * 14 * 64 + 2 * 14
    gates = 2 * 64 * E + 2 * 41 * 64 + 2 * 41 + 1
    scalars = 4 * LAYERS + 2 * LAYERS + 2  # of residual streams, of attention; smear and skip
    small = 12 + 5 * H * 12
    record = bigrams + values + embed_and_head + matrices + mudd + gates + scalars + small
    padding = 4 * 256 * E + 4 * E * E + 2 * 4 * E * E  # of its banks
    unused = (14 - 5) * 64 + (14 - 5) + (41 - 26) * 64 + (41 - 26)  # of the smaller networks
    unused += H * 12 + 4 + 2 + 2  # of the last layer's values and scales, and of attention in 6
    make = fdl.build(modded_124m.config().model)
    model = jax.eval_shape(lambda: make(key=jax.random.key(0)))
    # Each of our two networks of gates has a scale of its own.
    assert sum(x.size for x in jax.tree.leaves(model)) == record - padding - unused + 1


def test_rates_are_the_records():
    """`TrainingSchedule.get_lr`."""
    found = fdl.build(modded_124m.config().optimizer.schedule)(0.5, 423)
    boundaries = [round(1_270 * i / 3) for i in (1, 2)]
    for step in (0, 422, 423, 507, 508, 600, 846, 847, 1_269, 1_270, 1_284):
        rate = (1.0, 1.52, 1.73)[sum(step >= each for each in boundaries)]
        start = int(1_270 * (1 - 0.60))
        if step >= start:
            t = min(1.0, (step - start) / (1_270 - start))
            rate = rate * (1 - t) + 0.15 * t
        assert float(found(step)) == pytest.approx(0.5 * rate, rel=1e-5)
    with pytest.raises(ValueError, match="2 stages, 1 factors"):
        stage_rates(1.0, 10, begins=(5,), factors=(1.0,), decay_from=2, decay_until=8, end=0.1)


def test_stages_change_windows_batches_and_later_tokens():
    last = modded_124m.config(stage=4)
    assert last.model.yarn_windows == (384, 896, 1_408, 1_664) and last.steps == 1_285
    assert [stage.begin for stage in last.later_stages] == [423, 847, 1_270]
    for begun, of_record in zip(
        (last.data, *(stage.data for stage in last.later_stages)),
        (8 * 2_048 * 8, 16 * 2_048 * 8, 24 * 2_048 * 8, 24 * 2_048 * 8),
        strict=True,
    ):
        tokens = begun.batch_size * begun.sequence_length
        assert tokens == pytest.approx(of_record, rel=0.02) and begun.begin_with_documents
        assert begun.batch_size % 8 == 0
    assert modded_124m.config().objective.weights == (0.5, 0.125)
    assert last.objective.weights == ()
    with pytest.raises(ValueError, match="stage must be 1, 2, 3 or 4, got 0"):
        modded_124m.config(stage=0)


@pytest.mark.slow
def test_a_tiny_one_learns_and_goes_on_with_the_next_stage(tmp_path):
    settings = ["optimizer.schedule.begins=(20, 40)", "compute.dtype=float32", "mesh.fsdp=1"]
    first = fit(
        configs.load("experiments/modded_124m", ["tiny"], settings),
        tmp_path / "first",
    )
    losses = [line["loss"] for line in first.metrics]
    assert losses[-1] < losses[0] - 0.3
    later = configs.load("experiments/modded_124m", ["tiny"], ["stage=2", *settings, "steps=24"])
    assert later.model.yarn_windows == (384, 896)
    later.init_from, later.continue_optimizer = f"{tmp_path / 'first'}@20", True
    second = fit(later, tmp_path / "second", Options(allowed_changes=("model",)))
    assert [line["step"] for line in second.metrics] == [21, 22, 23, 24]
