"""A law of compute is found again, and predicts the next rung; too few rungs are refused."""

import numpy as np
import pytest

from lmlib.verdicts.compute_law import fit_compute_law

FLOPS = np.array([1e11, 4e11, 2e12, 6e12, 2e13])


def loss(flops):
    return 1.7 + 30.0 * flops**-0.1


def test_losses_without_noise_give_the_very_law_and_the_next_rung():
    found = fit_compute_law(FLOPS, loss(FLOPS))
    assert found.fit.law.numbers == pytest.approx([1.7, 30.0, 0.1], rel=1e-3)
    assert found.fit.error < 1e-6
    assert found.loss(1e15).value == pytest.approx(loss(1e15), rel=1e-4)


@pytest.mark.landing
def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    inside = []
    for seed in range(100):
        noise = np.exp(2e-3 * np.random.default_rng(seed).standard_normal(len(FLOPS)))
        at = fit_compute_law(FLOPS, loss(FLOPS) * noise).loss(1e14)
        inside.append(at.low <= loss(1e14) <= at.high)
    assert 0.82 <= np.mean(inside) <= 0.98


@pytest.mark.parametrize(
    ("flops", "said"),
    [(FLOPS[:3], "these are 3 of 3"), (np.array([1e11, 1e11, 2e11, 3e11]), "factor of 4")],
)
def test_what_does_not_identify_the_law_is_refused(flops, said):
    with pytest.raises(ValueError, match=said):
        fit_compute_law(flops, loss(flops))
