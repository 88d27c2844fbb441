import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusals

from lmlib.data.permutation import GOLDEN_GAMMA, hash_words, permute, splitmix64

SEEDS = st.integers(0, 2**64 - 1)


def test_bijection_for_every_small_size_and_some_larger_ones():
    for size in (*range(1, 400), 4**8 - 1, 4**8, 4**8 + 1, 100_003):
        image = permute(np.arange(size), size, seed=size, epoch=size % 3)
        assert np.array_equal(np.sort(image), np.arange(size)), size


@settings(max_examples=50)
@given(size=st.integers(1, 2**63), seed=SEEDS, epoch=SEEDS, data=st.data())
def test_any_size_stays_in_range_without_collisions(size, seed, epoch, data):
    points = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    image = permute(np.array(points), size, seed=seed, epoch=epoch)
    assert image.dtype == np.int64
    assert all(0 <= int(point) < size for point in image)
    assert len(np.unique(image)) == len(points)
    alone = permute(np.array(points[0]), size, seed=seed, epoch=epoch)
    assert alone.shape == () and alone == image[0]


@pytest.mark.landing
def test_all_orders_of_few_elements_are_equally_likely(stats):
    orders = list(itertools.permutations(range(4)))
    counts = dict.fromkeys(orders, 0)
    for seed in range(4800):
        counts[tuple(permute(np.arange(4), 4, seed=seed, epoch=0).tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_a_large_permutation_looks_random(stats):
    size = 200_000
    points = np.arange(size)
    first = permute(points, size, seed=0, epoch=0)
    second = permute(points, size, seed=0, epoch=1)
    other_seed = permute(points, size, seed=1, epoch=0)

    # A 16 × 16 table of the places of neighbouring points.
    table = np.histogram2d(first[:-1], first[1:], bins=16)[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-4
    displacement = np.bincount((first - points) % size * 64 // size, minlength=64)
    assert stats.chisquare(displacement).pvalue > 1e-4
    for one, another in itertools.combinations([points, first, second, other_seed], 2):
        assert abs(np.corrcoef(one, another)[0, 1]) < 5 / np.sqrt(size)
        # Two random permutations agree on one point on average.
        assert np.sum(one == another) < 12


def test_the_order_never_changes_between_versions():
    assert permute(np.arange(10), 10, seed=0, epoch=0).tolist() == [5, 1, 7, 6, 8, 0, 9, 2, 4, 3]
    assert permute(np.arange(10), 10, seed=0, epoch=1).tolist() == [3, 6, 1, 4, 9, 7, 5, 8, 2, 0]
    assert permute(np.arange(5), 2**40 + 1, seed=2**64 - 1, epoch=7).tolist() == [
        850229850070,
        802349246375,
        906823528305,
        253641864409,
        319563064050,
    ]
    assert permute(np.arange(3), 2**63, seed=5, epoch=0).tolist() == [
        3161989766576481971,
        7545692651890413972,
        245894138108333782,
    ]


@pytest.mark.parametrize(("size", "seed", "epoch", "message"), refusals(__file__, "permutation"))
def test_errors(size, seed, epoch, message):
    with pytest.raises(ValueError, match=message):
        permute(np.zeros(1, int), size, seed=seed, epoch=epoch)


def test_splitmix64_matches_the_published_sequence():
    # The first outputs for the seed 1234567, as printed by the reference C code.
    states = np.uint64(1234567) + np.arange(5, dtype=np.uint64) * GOLDEN_GAMMA
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_hash_words_depends_on_order_and_broadcasts():
    grid = hash_words(7, np.arange(3)[:, None], np.arange(4))
    assert grid.shape == (3, 4)
    assert len(np.unique(grid)) == 12
    assert grid[1, 2] == hash_words(7, 1, 2)[0]
    assert hash_words(1, 2)[0] != hash_words(2, 1)[0]
    assert hash_words(-1)[0] == hash_words(2**64 - 1)[0]
