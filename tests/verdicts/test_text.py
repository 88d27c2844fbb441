"""Verdicts from batches of a difference, against sums written out, and against known chances."""

import math

import numpy as np
import pytest
from made_up_runs import leave_run

from lmlib.evaluate.ratio import Ratio
from lmlib.runs import find_runs
from lmlib.terminal.table import WIDTH
from lmlib.verdicts import compare
from lmlib.verdicts.table import comparison_text
from lmlib.verdicts.text import BatchDifferences, text_precision


def made(generator, seeds, batches, of_batch, of_both, counts=None):
    """Makes differences with a part of the batch, equal for all seeds, and a part of both."""
    counts_N = np.full(batches, 50.0) if counts is None else counts
    means_SN = of_batch * generator.standard_normal(batches)
    means_SN = means_SN + of_both * generator.standard_normal((seeds, batches))
    return BatchDifferences(means_SN * counts_N, counts_N)


def test_one_seed_has_the_standard_error_of_a_ratio():
    counts_N = np.random.default_rng(0).integers(1, 99, 30).astype(float)
    each = made(np.random.default_rng(1), 1, 30, 1.0, 0.0, counts_N)
    ratio = Ratio()
    for y, x in zip(each.sums_SN[0], counts_N, strict=True):
        ratio.add(y, x)
    found = text_precision([each])
    assert found.of_one_seed == pytest.approx(ratio.estimate().standard_error)
    assert found.of_the_mean == pytest.approx(found.of_one_seed) and found.share is None


def test_shared_errors_stay_and_others_average_out():
    generator = np.random.default_rng(0)
    seeds, batches = 8, 2_000
    shared = text_precision([made(generator, seeds, batches, 1.0, 0.0)])
    assert shared.of_the_mean == pytest.approx(1 / math.sqrt(batches), rel=0.1)
    apart = text_precision([made(generator, seeds, batches, 0.0, 1.0)])
    assert apart.of_one_seed == pytest.approx(1 / math.sqrt(batches), rel=0.1)
    assert apart.of_the_mean == pytest.approx(1 / math.sqrt(batches * seeds), rel=0.1)


@pytest.mark.parametrize("seeds", [3, 10])
@pytest.mark.parametrize("share", [0.13, 0.6])
def test_the_share_of_the_text_in_what_differs_between_seeds_is_in_its_interval(seeds, share):
    """Differences of seeds have a variance of 1; `share` of it comes from the text."""
    generator, batches, count = np.random.default_rng(0), 60, 800
    inside = 0
    for _ in range(count):
        each = made(generator, seeds, batches, 1.0, math.sqrt(share * batches))
        of_seeds = math.sqrt(1 - share) * generator.standard_normal((seeds, 1))
        each.sums_SN[:] += of_seeds * each.counts_N
        low, high = text_precision([each]).share
        inside += low <= share <= high
    assert inside / count == pytest.approx(0.9, abs=4 * math.sqrt(0.09 / count))


def test_the_share_is_that_of_a_two_way_analysis_of_variance(stats):
    each = made(np.random.default_rng(2), 4, 30, 0.0, 1.0)
    low, high = text_precision([each]).share
    x_SN = each.sums_SN / each.counts_N
    of_seeds, of_batches = x_SN.mean(1, keepdims=True), x_SN.mean(0)
    left = np.sum((x_SN - of_seeds - of_batches + x_SN.mean()) ** 2) / (3 * 29)
    quotient = 30 * np.var(of_seeds, ddof=1) / left
    for end, level in ((low, 0.05), (high, 0.95)):
        assert end == pytest.approx(min(stats.f.ppf(level, 3, 87) / quotient, 1))


def test_a_text_that_decides_little_is_said_to(tmp_path):
    generator = np.random.default_rng(0)
    for of_seeds, of_batches, told in (
        (1e-2, 1e-4, "(90 % interval). More seeds would help more."),
        (1e-5, 1e-1, "It is unclear whether more seeds or more text would help more."),
    ):
        folder = tmp_path / told[:9]
        for seed in range(3):
            for rate in (0.1, 0.2):
                loss = 3.0 + of_seeds * generator.standard_normal()
                losses = loss + of_batches * generator.standard_normal(50)
                settings = {"optimizer.peak_lr": rate, "seed": seed}
                leave_run(folder / f"{rate}_{seed}", losses, settings)
        text = comparison_text(compare(find_runs([folder]), baseline="optimizer.peak_lr=0.1"))
        assert max(map(len, text.splitlines())) <= WIDTH
        assert told in " ".join(text.split())


def test_sets_add_up_by_their_factors():
    generator = np.random.default_rng(0)
    one, other = (made(generator, 3, 40, 1.0, 1.0) for _ in range(2))
    half = [BatchDifferences(each.sums_SN, each.counts_N, 0.5) for each in (one, other)]
    alone = [text_precision([each]).of_the_mean for each in (one, other)]
    assert text_precision(half).of_the_mean == pytest.approx(0.5 * math.hypot(*alone))
    assert text_precision([one, BatchDifferences(one.sums_SN[:, :1], one.counts_N[:1])]) is None
