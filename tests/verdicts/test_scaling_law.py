"""Laws of known numbers are found again, within their intervals; what is not identified is told."""

import numpy as np
import pytest

from lmlib.verdicts.power_law import PowerLaw, fit_power_law
from lmlib.verdicts.scaling_law import fit_scaling_law

# Table A3 of Hoffmann et al. 2022: E, A, B, α, β.
TRUTH = PowerLaw(1.69, np.array([406.4, 410.7]), np.array([0.34, 0.28]))
SIZES = (2e7, 5e7, 1.2e8, 3e8)
PLACES = np.array([(n, n * ratio) for n in SIZES for ratio in (3, 12, 50)])


def noisy(law, x_RK, noise, seed):
    generator = np.random.default_rng(seed)
    return law.loss(x_RK) * np.exp(noise * generator.standard_normal(len(x_RK)))


def test_losses_without_noise_give_the_very_law():
    found = fit_power_law(PLACES, TRUTH.loss(PLACES))
    assert found.numbers == pytest.approx(TRUTH.numbers, rel=1e-5)


def test_one_wild_run_hardly_moves_it():
    """The Huber loss is why; squares would be moved by all of it."""
    losses = noisy(TRUTH, PLACES, 1e-4, 0)
    undisturbed = fit_power_law(PLACES, losses)
    losses[4] *= 1.5
    assert fit_power_law(PLACES, losses).numbers == pytest.approx(undisturbed.numbers, rel=0.05)


def best_size(flops):
    """The parameters with the least loss of all that a budget of 6·N·D pays for."""
    sizes = np.geomspace(1e8, 1e12, 400_001)
    return sizes[np.argmin(TRUTH.loss(np.column_stack([sizes, flops / 6 / sizes])))]


def test_the_best_share_of_a_budget_is_that_of_a_search():
    law = fit_scaling_law(*PLACES.T, noisy(TRUTH, PLACES, 1e-7, 0), 5)
    for flops in (1e20, 1e22):
        found, size = law.optimum(flops), best_size(flops)
        assert found["parameters"].value == pytest.approx(size, rel=1e-2)
        assert found["tokens"].value == pytest.approx(flops / 6 / size, rel=1e-2)
        expected = TRUTH.loss(np.array([[size, flops / 6 / size]]))[0]
        assert found["loss"].value == pytest.approx(expected, rel=1e-4)


def covered(ladders, resamples):
    """How often each number, and the best size for a budget, is in its interval."""
    flops, inside = 1e21, []
    best = best_size(flops)
    for seed in range(ladders):
        law = fit_scaling_law(*PLACES.T, noisy(TRUTH, PLACES, 1e-3, seed), resamples)
        numbers = dict(zip(law.names, TRUTH.numbers, strict=True))
        found = [(law.numbers[name], value) for name, value in numbers.items()]
        found.append((law.optimum(flops)["parameters"], best))
        inside.append([each.low <= value <= each.high for each, value in found])
    return np.mean(inside, axis=0)


@pytest.mark.landing
def test_the_truth_is_in_most_intervals():
    assert covered(6, 40).min() >= 4 / 6


@pytest.mark.slow
def test_the_truth_is_in_the_intervals_at_their_rate():
    assert covered(60, 60).min() >= 0.9 - 4 * np.sqrt(0.9 * 0.1 / 60)


def test_forks_of_one_run_give_the_law_of_their_tokens():
    tokens = np.array([1e8, 2e8, 4e8, 8e8, 1.6e9])
    size = 5e7
    losses = TRUTH.loss(np.column_stack([np.full(5, size), tokens]))
    found = fit_scaling_law(np.full(5, size), tokens, losses, 20)
    assert found.names == ("E", "B", "β") and found.fixed == {"parameters": size}
    assert str(found) == "L = E + B/D^β"
    expected = (1.69 + 406.4 / size**0.34, 410.7, 0.28)
    assert [each.value for each in found.numbers.values()] == pytest.approx(expected, rel=1e-3)
    assert found.loss(size, 3e9) == pytest.approx(TRUTH.loss(np.array([[size, 3e9]]))[0], rel=1e-3)
    with pytest.raises(ValueError, match="needs runs of several parameters: all of these have 50"):
        found.optimum(1e20)


def along(ratio):
    return np.array([(n, ratio * n) for n in (1e7, 2e7, 4e7, 8e7, 1.6e8, 3.2e8, 6.4e8)])


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (PLACES[:1].repeat(9, axis=0), "the same parameters and tokens"),
        (PLACES[:6], "E, A and α are not identified: the runs have 2 numbers of parameters"),
        (along(20.0), "α and β are not identified: the tokens of these runs follow from"),
        (PLACES[[0, 4, 8, 9, 3]], "5 numbers need at least 6 runs, at 5 different places"),
        (np.array([(n, d) for n in (1e7, 1.1e7, 1.2e7) for d in (1e8, 2e8, 4e8)]),
         "which span a factor of 1.20; give runs of at least 3 that span 2"),
    ],
)  # fmt: skip
def test_what_is_not_identified_is_named(places, told):
    with pytest.raises(ValueError, match=told):
        fit_scaling_law(*places.T, TRUTH.loss(places) * np.linspace(1, 1.001, len(places)))


def test_a_loss_without_a_floor_says_so():
    bare = PowerLaw(1e-12, TRUTH.scales_K, TRUTH.exponents_K)
    with pytest.raises(ValueError, match="E is not identified"):
        fit_scaling_law(*PLACES.T, bare.loss(PLACES))


def test_losses_that_are_none_are_refused():
    with pytest.raises(ValueError, match="a law is of positive losses"):
        fit_scaling_law(*PLACES.T, TRUTH.loss(PLACES) * np.where(np.arange(12) == 3, np.nan, 1))
