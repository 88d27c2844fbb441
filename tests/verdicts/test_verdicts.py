"""Verdicts over seeds err as rarely as they say, and find effects as often as they say."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from sentinels import sentinels

from lmlib.verdicts.seeds import (
    MOST_SEEDS,
    Difference,
    paired_difference,
    power,
    seeds_needed,
    smallest_effect,
    unpaired_difference,
)

RATE = 0.05
COMPARISONS = 4_000
# The error of a share of 5 % in these comparisons; it is exceeded fourfold once in 30,000 times.
STANDARD_ERROR = math.sqrt(RATE * (1 - RATE) / COMPARISONS)


# Errors of a run, with a mean of 0 and a spread of about 1.
ERRORS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda generator, shape: generator.standard_normal(shape),
    "heavy tails": lambda generator, shape: generator.standard_t(2, shape),
    "skewed": lambda generator, shape: np.exp(generator.standard_normal(shape)) - np.exp(0.5),
}


@dataclasses.dataclass(frozen=True)
class Design:
    """Seeds of both settings, pairing, correlation of losses at one seed, deviations and effect."""

    errors: str = "normal"
    seeds: int = 3
    baseline_seeds: int | None = None
    paired: bool = True
    correlation: float = 0.0
    deviations: tuple[float, float] = (1.0, 1.0)
    effect: float = 0.0


def differences(design: Design, count: int, seed: int = 0) -> list[Difference]:
    """Returns `count` independent comparisons; the setting's loss is higher by the effect."""
    generator, draw = np.random.default_rng(seed), ERRORS[design.errors]
    common = np.sqrt(design.correlation) * draw(generator, (count, design.seeds))
    apart = np.sqrt(1 - design.correlation)
    ours_CS = common + apart * draw(generator, (count, design.seeds))
    ours_CS = design.effect + design.deviations[0] * ours_CS
    theirs_CT = apart * draw(generator, (count, design.baseline_seeds or design.seeds))
    if design.paired:
        return [paired_difference(each) for each in ours_CS - (common + theirs_CT)]
    both = min(common.shape[1], theirs_CT.shape[1])
    theirs_CT[:, :both] += common[:, :both]
    theirs_CT = design.deviations[1] * theirs_CT
    return [unpaired_difference(*each) for each in zip(ours_CS, theirs_CT, strict=True)]


def share(found: list[Difference], verdict: str, margin: float = 0.0, rate: float = 0.05) -> float:
    """Returns the fraction of comparisons with this verdict."""
    return sum(each.verdict(margin, rate) == verdict for each in found) / len(found)


def test_verdicts_equal_one_sided_t_tests_of_scipy(stats):
    generator = np.random.default_rng(0)
    for seeds in (3, 4, 9):
        values, baseline = generator.normal(3.0, 0.01, (2, seeds))
        found = paired_difference(values - baseline)
        for margin in (0.0, 0.004):
            p = stats.ttest_1samp(values - baseline + margin, 0.0, alternative="less").pvalue
            if found.mean < -margin:
                assert found.verdict(margin, p * 1.001) == "better"
                assert found.verdict(margin, p * 0.999) == "inconclusive"
        expected = stats.ttest_rel(values, baseline).confidence_interval(1 - 2 * RATE)
        assert found.interval(RATE) == pytest.approx((expected.low, expected.high))
    values, baseline = generator.normal(3.0, 0.01, 3), generator.normal(3.1, 0.04, 7)
    found, expected = (
        unpaired_difference(values, baseline),
        stats.ttest_ind(values, baseline, equal_var=False),
    )
    assert found.mean / found.standard_error == pytest.approx(expected.statistic)
    assert found.seeds == 3 and expected.df >= 2 and not found.paired
    reach = stats.t.ppf(1 - RATE, 2) * found.standard_error  # of the smaller number of seeds
    assert found.interval(RATE) == pytest.approx((found.mean - reach, found.mean + reach))


DESIGNS = [
    *(Design(errors, seeds, correlation=rho)
      for errors in ERRORS for seeds in (3, 5) for rho in (0.0, 0.9)),
    *(Design(errors, 3, other, paired=False) for errors in ERRORS for other in (3, 10)),
    Design(paired=False, correlation=0.9),
    *(Design(errors, 3, 10, False, deviations=(2.0, 1.0)) for errors in ("normal", "heavy tails")),
]  # fmt: skip


@pytest.mark.parametrize(
    "design", sentinels(DESIGNS, lambda each: each.errors == "normal"), ids=str
)
def test_without_an_effect_better_is_said_at_most_as_often_as_allowed(design):
    found = differences(design, COMPARISONS)
    for verdict in ("better", "worse"):
        assert share(found, verdict) <= RATE + 4 * STANDARD_ERROR
        # Differences within the margin do not count as effects, and are found still more rarely.
        assert share(found[:1_000], verdict, margin=0.5) <= RATE
    if design.errors == "normal" and design.paired:  # where the test is exact
        assert share(found, "better") >= RATE - 4 * STANDARD_ERROR


def test_fewer_than_three_seeds_and_what_cannot_be_judged_are_inconclusive():
    values = np.array([3.0, 3.0 + 1e-6])
    few = paired_difference(values - 5.0), unpaired_difference(values, values + 9)
    for found in (*few, paired_difference(values[:1] - 5.0)):
        assert found.verdict(0.0, RATE) == "inconclusive"
        assert smallest_effect(found, 0.0, RATE) is None
    for each in ([-1.0, -1.0, -1.0], [-1.0, math.nan, -1.0], [-1.0, -math.inf, -1.1]):
        found = paired_difference(np.array(each))
        assert found.verdict(0.0, RATE) == "inconclusive"
        assert seeds_needed(found, 0.0, RATE) is None


@pytest.mark.parametrize("seeds", [3, 6])
def test_effects_are_found_as_often_as_the_noncentral_t_says(seeds):
    design = Design(seeds=seeds, effect=-2.0)
    expected = power(2.0 - 0.5, math.sqrt(2), seeds, RATE)
    assert share(differences(design, COMPARISONS), "better", 0.5) == pytest.approx(
        expected, abs=4 * math.sqrt(expected * (1 - expected) / COMPARISONS)
    )
    # An effect as large as the margin is found no more often than allowed.
    found = differences(Design(seeds=seeds, effect=-0.3), COMPARISONS)
    assert abs(share(found, "better", margin=0.3) - RATE) <= 4 * STANDARD_ERROR


def test_the_smallest_effect_is_found_four_times_in_five():
    known = Difference(0.0, 4, True, math.sqrt(2), math.sqrt(2 / 4))
    effect = smallest_effect(known, 0.1, RATE)
    found = share(differences(Design(seeds=4, effect=-effect), COMPARISONS), "better", 0.1)
    assert found == pytest.approx(0.8, abs=4 * math.sqrt(0.16 / COMPARISONS))
    for seeds in (3, 9, 1_000):
        for rate in (1e-4, 0.05, 0.5):
            effect = smallest_effect(Difference(0.0, seeds, True, 1.0, 1.0), 0.0, rate)
            assert power(effect, 1.0, seeds, rate) == pytest.approx(0.8, abs=1e-5)


def test_seeds_needed_are_the_fewest_with_enough_power(stats):
    known = Difference(-0.9, 4, True, 1.0, 0.5)
    needed = seeds_needed(known, 0.1, RATE)
    one_fewer, enough = (
        stats.nct.sf(stats.t.isf(RATE, n - 1), n - 1, 0.8 * math.sqrt(n))
        for n in (needed - 1, needed)
    )
    assert one_fewer < 0.8 <= enough
    assert seeds_needed(known, 0.9, RATE) is None  # within the margin
    assert seeds_needed(Difference(-1e-4, 3, True, 1.0, 0.6), 0.0, RATE) is None
    assert seeds_needed(Difference(-40.0, 3, True, 1.0, 0.6), 0.0, RATE) == 3
    assert MOST_SEEDS == 1_000
