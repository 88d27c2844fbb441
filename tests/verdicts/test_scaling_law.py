"""Laws with known numbers are found again, within their intervals; unidentified ones are named."""

import numpy as np
import pytest
from scipy import optimize, stats

from lmlib.verdicts.power_law import Fit, PowerLaw
from lmlib.verdicts.scaling_law import ScalingLaw, fit_scaling_law

# Table A3 of Hoffmann et al. 2022: E, A, B, α, β.
TRUTH = PowerLaw(1.69, np.array([406.4, 410.7]), np.array([0.34, 0.28]))
SIZES = (2e7, 5e7, 1.2e8, 3e8)
PLACES = np.array([(n, n * ratio) for n in SIZES for ratio in (3, 12, 50)])


def noisy(law, x_RK, noise, seed):
    generator = np.random.default_rng(seed)
    return law.loss(x_RK) * np.exp(noise * generator.standard_normal(len(x_RK)))


def test_losses_without_noise_give_the_very_law_and_one_wild_run_hardly_moves_it():
    """The Huber loss is why; squares would be moved by all of it."""
    found = Fit(PLACES, TRUTH.loss(PLACES)).law
    assert found.numbers == pytest.approx(TRUTH.numbers, rel=1e-5)
    losses = noisy(TRUTH, PLACES, 1e-4, 0)
    undisturbed = Fit(PLACES, losses).law
    losses[4] *= 1.5
    assert Fit(PLACES, losses).law.numbers == pytest.approx(undisturbed.numbers, rel=0.05)


def best_size(flops):
    """The parameters with the least loss of all that a budget of 6·N·D pays for."""
    sizes = np.geomspace(1e8, 1e12, 400_001)
    return sizes[np.argmin(TRUTH.loss(np.column_stack([sizes, flops / 6 / sizes])))]


def test_the_best_share_of_a_budget_is_that_of_a_search():
    law = fit_scaling_law(*PLACES.T, noisy(TRUTH, PLACES, 1e-7, 0))
    for flops in (1e20, 1e22):
        found, size = law.optimum(flops), best_size(flops)
        assert found["parameters"].value == pytest.approx(size, rel=1e-2)
        assert found["tokens"].value == pytest.approx(flops / 6 / size, rel=1e-2)
        expected = TRUTH.loss(np.array([[size, flops / 6 / size]]))[0]
        assert found["loss"].value == pytest.approx(expected, rel=1e-4)


BUDGET = 1e21
CRITICAL = stats.f.ppf(0.9, 1, len(PLACES) - 5)


def errors(numbers, losses):
    """Returns the errors in the logarithms of `losses`, for E, A, B, α and β."""
    floor, a, b, alpha, beta = numbers
    n, d = PLACES.T
    return np.log(floor + a * n**-alpha + b * d**-beta) - np.log(losses)


def best_of(numbers):
    """The best number of parameters for BUDGET."""
    _, a, b, alpha, beta = numbers
    share = alpha * a / (beta * b)
    return share ** (1 / (alpha + beta)) * (BUDGET / 6) ** (beta / (alpha + beta))


def test_small_errors_give_students_intervals():
    """The reference is the problem made linear in the logarithms of the numbers."""
    losses = noisy(TRUTH, PLACES, 1e-5, 1)
    law = fit_scaling_law(*PLACES.T, losses)
    logs, nudges = np.log(law.fit.law.numbers), 1e-5 * np.eye(5)

    def slopes(function):
        return (
            np.array([function(np.exp(logs + e)) - function(np.exp(logs - e)) for e in nudges])
            / 2e-5
        )

    jacobian = slopes(lambda numbers: errors(numbers, losses)).T
    variance = np.sum(errors(law.fit.law.numbers, losses) ** 2) / (len(PLACES) - 5)
    covariance = variance * np.linalg.inv(jacobian.T @ jacobian)
    quantities = [lambda numbers, i=i: np.log(numbers[i]) for i in range(5)]
    quantities.append(lambda numbers: np.log(best_of(numbers)))
    found = [*law.numbers.values(), law.optimum(BUDGET)["parameters"]]
    for each, quantity in zip(found, quantities, strict=True):
        slope = slopes(quantity)
        reach = stats.t.ppf(0.95, len(PLACES) - 5) * np.sqrt(slope @ covariance @ slope)
        assert np.log(each.high / each.value) == pytest.approx(reach, rel=0.02)
        assert np.log(each.value / each.low) == pytest.approx(reach, rel=0.02)


def with_best(size, rest):
    """Five numbers whose best size for BUDGET is `size`, of all but A."""
    floor, b, alpha, beta = rest
    a = beta * b / alpha * size ** (alpha + beta) * (BUDGET / 6) ** -beta
    return floor, a, b, alpha, beta


def test_at_the_ends_of_an_interval_the_squares_have_risen_as_f_says():
    """Errors are large here, and intervals far from symmetric."""
    losses = noisy(TRUTH, PLACES, 6e-3, 2)
    law = fit_scaling_law(*PLACES.T, losses)

    def least_squares(numbers, start):
        found = optimize.least_squares(
            lambda logs: errors(numbers(np.exp(logs)), losses), np.log(start),
            x_scale="jac", xtol=1e-12, ftol=1e-12, gtol=1e-12, max_nfev=5_000,
        )  # fmt: skip
        return 2 * found.cost

    start = law.fit.law.numbers
    expected = least_squares(lambda numbers: numbers, start) * (1 + CRITICAL / (len(PLACES) - 5))
    best, floor = law.optimum(BUDGET)["parameters"], law.numbers["E"]
    assert best.value / best.low > 1.5 * best.high / best.value
    for end in (best.low, best.high):
        held = least_squares(lambda rest, end=end: with_best(end, rest), start[[0, 2, 3, 4]])
        assert held == pytest.approx(expected, rel=0.01)
    held = least_squares(lambda rest: (floor.high, *rest), start[1:])
    assert held == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_the_best_size_is_in_its_interval_at_its_rate():
    """With these errors, a bootstrap's intervals held the best size in only 78 % of ladders."""
    inside, best = [], best_of(TRUTH.numbers)
    for seed in range(200):
        losses = noisy(TRUTH, PLACES, 1.2e-2, seed)
        fit = Fit(PLACES, losses)
        found = ScalingLaw(("parameters", "tokens"), {}, fit).optimum(BUDGET)["parameters"]
        inside.append(found.low <= best <= found.high)
    assert 0.85 <= np.mean(inside) <= 0.95


def test_forks_of_one_run_give_the_law_of_their_tokens():
    tokens = np.array([1e8, 2e8, 4e8, 8e8, 1.6e9])
    size = 5e7
    losses = TRUTH.loss(np.column_stack([np.full(5, size), tokens]))
    found = fit_scaling_law(np.full(5, size), tokens, losses)
    assert found.names == ("E", "B", "β") and found.fixed == {"parameters": size}
    assert str(found) == "L = E + B/D^β"
    expected = (1.69 + 406.4 / size**0.34, 410.7, 0.28)
    assert [each.value for each in found.numbers.values()] == pytest.approx(expected, rel=1e-3)
    assert found.loss(size, 3e9) == pytest.approx(TRUTH.loss(np.array([[size, 3e9]]))[0], rel=1e-3)
    with pytest.raises(ValueError, match="several numbers of parameters: all of these have 50"):
        found.optimum(1e20)


def along(ratio):
    return np.array([(n, ratio * n) for n in (1e7, 2e7, 4e7, 8e7, 1.6e8, 3.2e8, 6.4e8)])


BARE = PowerLaw(1e-12, TRUTH.scales_K, TRUTH.exponents_K)


@pytest.mark.parametrize(
    ("places", "law", "told"),
    [
        (PLACES[:1].repeat(9, axis=0), TRUTH, "the same parameters and tokens"),
        (PLACES[:6], TRUTH, "E, A and α are not identified: the runs have 2 numbers of parameters"),
        (along(20.0), TRUTH, "α and β are not identified: the tokens of these runs follow from"),
        (PLACES[[0, 4, 8, 9, 3]], TRUTH, "5 parameters need at least 6 runs at 5 different places"),
        (np.array([(n, d) for n in (1e7, 1.1e7, 1.2e7) for d in (1e8, 2e8, 4e8)]), TRUTH,
         "which span a factor of 1.20. Give at least 3 that span 2, or one"),
        (PLACES, BARE, "E is not identified"),
        (PLACES, PowerLaw(np.nan, BARE.scales_K, BARE.exponents_K), "a law needs positive losses"),
    ],
)  # fmt: skip
def test_unidentified_parameters_are_named(places, law, told):
    noise = 1 if law is BARE else np.linspace(1, 1.001, len(places))
    with pytest.raises(ValueError, match=told):
        fit_scaling_law(*places.T, law.loss(places) * noise)


FLOPS = np.array([1e11, 4e11, 2e12, 6e12, 2e13])


def by_compute(flops, losses):
    return fit_scaling_law(flops / 6e6, np.full(len(flops), 1e6), losses, of_compute=True)


def of_compute(flops):
    return 1.7 + 30.0 * flops**-0.1


def test_a_law_of_compute_is_found_and_predicts_the_next_rung():
    found = by_compute(FLOPS, of_compute(FLOPS))
    assert str(found) == "L = E + A/C^γ"
    assert found.fit.law.numbers == pytest.approx([1.7, 30.0, 0.1], rel=1e-3)
    assert found.optimum(1e15)["loss"].value == pytest.approx(of_compute(1e15), rel=1e-4)
    assert found.loss(1e9, 1e6 / 6) == pytest.approx(of_compute(1e15), rel=1e-4)
    with pytest.raises(ValueError, match="there are 3 at 3"):
        by_compute(FLOPS[:3], of_compute(FLOPS[:3]))
    with pytest.raises(ValueError, match=r"a factor of 3\.00\. Give at least 3 that span 4\."):
        by_compute(np.array([1e11, 1e11, 2e11, 3e11]), of_compute(FLOPS[:4]))


@pytest.mark.landing
def test_an_interval_of_a_prediction_holds_the_truth_about_as_often_as_it_says():
    inside = []
    for seed in range(100):
        noise = np.exp(2e-3 * np.random.default_rng(seed).standard_normal(len(FLOPS)))
        at = by_compute(FLOPS, of_compute(FLOPS) * noise).optimum(1e14)["loss"]
        inside.append(at.low <= of_compute(1e14) <= at.high)
    assert 0.82 <= np.mean(inside) <= 0.98
