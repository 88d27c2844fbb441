"""What batches tell of a difference: against sums written out, and against known chances."""

import math

import numpy as np
import pytest

from lmlib.evaluate.ratio import Ratio
from lmlib.verdicts.text import BatchDifferences, text_precision


def made(generator, seeds, batches, of_batch, of_both, counts=None):
    """Differences of which a part is the batch's, alike for all seeds, and a part is of both."""
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


def test_what_all_seeds_share_stays_and_what_they_do_not_averages_out():
    generator = np.random.default_rng(0)
    seeds, batches = 8, 2_000
    shared = text_precision([made(generator, seeds, batches, 1.0, 0.0)])
    assert shared.of_the_mean == pytest.approx(1 / math.sqrt(batches), rel=0.1)
    apart = text_precision([made(generator, seeds, batches, 0.0, 1.0)])
    assert apart.of_one_seed == pytest.approx(1 / math.sqrt(batches), rel=0.1)
    assert apart.of_the_mean == pytest.approx(1 / math.sqrt(batches * seeds), rel=0.1)


def test_the_share_of_the_text_in_what_differs_between_seeds():
    """Seeds differ by 0.1 each, of which the text is to have a half, or nothing."""
    generator, batches = np.random.default_rng(0), 400
    noise = 0.1 / math.sqrt(2) * math.sqrt(batches)
    shares = {}
    for of_both, of_seed in ((noise, 0.1 / math.sqrt(2)), (1e-9, 0.1)):
        found = []
        for _ in range(200):
            each = made(generator, 20, batches, 1.0, of_both)
            each.sums_SN[:] += of_seed * generator.standard_normal((20, 1)) * each.counts_N
            found.append(text_precision([each]).share)
        shares[of_both] = np.median(found)
    assert shares[noise] == pytest.approx(0.5, abs=0.07)
    assert shares[1e-9] == pytest.approx(0.0, abs=1e-6)


def test_sets_add_up_by_their_factors():
    generator = np.random.default_rng(0)
    one, other = (made(generator, 3, 40, 1.0, 1.0) for _ in range(2))
    half = [BatchDifferences(each.sums_SN, each.counts_N, 0.5) for each in (one, other)]
    alone = [text_precision([each]).of_the_mean for each in (one, other)]
    assert text_precision(half).of_the_mean == pytest.approx(0.5 * math.hypot(*alone))
    assert text_precision([one, BatchDifferences(one.sums_SN[:, :1], one.counts_N[:1])]) is None
