"""Speedups of baselines whose curve is known."""

import numpy as np
import pytest
from made_up_runs import leave_run

from lmlib.runs import find_runs
from lmlib.verdicts import compare
from lmlib.verdicts.seeds import Difference
from lmlib.verdicts.speedup import Curve, speedup
from lmlib.verdicts.table import comparison_text

FLOOR, SCALE, EXPONENT = 2.0, 300.0, 0.4


def loss(tokens):
    return FLOOR + SCALE * tokens**-EXPONENT


def curve(noise=0.0, whole=True, seed=0):
    generator = np.random.default_rng(seed)
    tokens = np.repeat(np.geomspace(1e6, 1.6e7, 5), 3)
    noisy = loss(tokens) * np.exp(noise * generator.standard_normal(len(tokens)))
    return Curve(list(zip(tokens, noisy, strict=True)), whole)


def known(difference, error=1e-9):
    return Difference(difference, 3, True, error * 3**0.5, error)


@pytest.mark.parametrize("factor", [0.3, 0.8, 1.0, 1.3, 2.9])
def test_a_setting_worth_a_factor_of_tokens_has_that_speedup(factor):
    tokens = 8e6
    found = speedup(curve(), tokens, known(loss(factor * tokens) - loss(tokens)))
    assert found.factor == pytest.approx(factor, rel=1e-3)
    assert (found.low, found.high) == pytest.approx((factor, factor), rel=1e-3)


def test_nothing_is_read_beyond_twice_the_curve():
    """Twice 16 M tokens are four times 8 M; half of 1 M is a sixteenth."""
    far, below_the_floor, near = (
        speedup(curve(), 8e6, known(difference)) for difference in (-0.3, -3.0, 3.0)
    )
    assert far.factor == far.most == below_the_floor.factor == pytest.approx(4.0)
    assert near.factor == near.least == pytest.approx(1 / 16)


@pytest.mark.landing
def test_the_interval_holds_the_truth_at_its_rate():
    tokens, factor, error = 8e6, 1.3, 0.004
    truth = loss(factor * tokens) - loss(tokens)
    generator, inside = np.random.default_rng(1), []
    for seed in range(100):
        seen = truth + error * 3**0.5 * generator.standard_normal(3)
        deviation = float(np.std(seen, ddof=1))
        difference = Difference(float(seen.mean()), 3, True, deviation, deviation / 3**0.5)
        found = speedup(curve(1e-3, seed=seed), tokens, difference)
        inside.append(found.low <= factor <= found.high)
    assert 0.82 <= np.mean(inside) <= 0.98


def leave(folder, tokens, value, **settings):
    steps = int(tokens // 1e5)
    own = {step: loss(1e5 * step) + 0.1 for step in range(1, steps + 1, 2)}
    leave_run(folder, value, settings, steps, int(tokens), curve=own)


def test_a_ladder_of_lengths_is_preferred_and_costs_are_those_of_the_runs(tmp_path):
    """A setting that is worth 1.5 times the tokens, and twice the FLOPs for each."""
    for seed in range(3):
        off = 1e-4 * seed
        for tokens in (1e6, 2e6, 4e6, 8e6):
            path = tmp_path / f"plain_{tokens:.0f}_{seed}"
            leave(path, tokens, loss(tokens) + off, seed=seed, **{"model.wide": False})
        path = tmp_path / f"wide_{seed}"
        settings = {"model.wide": True, "seed": seed}
        wide = loss(1.5 * 4e6) + 2 * off
        leave_run(path, wide, settings, 40, 4_000_000, parameters=20_000_000)
    (row,) = [
        row
        for row in compare(find_runs([tmp_path]), baseline="model.wide=False").rows
        if row.judged is not None
    ]
    found = row.judged
    assert found.baseline.settings["steps"] == "40" and found.speedup.whole_schedules
    assert found.speedup.factor == pytest.approx(1.5, rel=0.02)
    assert found.of_compute == pytest.approx({"steps": 1.0, "FLOPs": 0.5, "seconds": 1.0})


def test_runs_of_one_length_use_their_own_curve(tmp_path):
    for seed in range(3):
        for wide in (False, True):
            value = loss(4e6) - 0.02 * wide + 1e-4 * seed * (1 + wide)
            leave(tmp_path / f"{wide}_{seed}", 4e6, value, seed=seed, **{"model.wide": wide})
    found = compare(find_runs([tmp_path]), baseline="model.wide=False")
    assert not found.rows[0].judged.speedup.whole_schedules
    text = comparison_text(found)
    assert "the baseline's validation during training" in text and "closer to 1" in text


def test_too_few_points_are_reported(tmp_path):
    leave_run(tmp_path / "a", 3.0, {"model.wide": False}, curve={50: 3.2, 100: 3.0})
    leave_run(tmp_path / "b", 2.9, {"model.wide": True})
    text = comparison_text(compare(find_runs([tmp_path]), baseline="model.wide=False"))
    assert "No speedup: the baseline has finite losses at 2 numbers of tokens" in text
