import numpy as np

from lmlib.data.splitmix64 import GOLDEN_GAMMA, hash_words, splitmix64


def test_splitmix64_matches_the_published_sequence() -> None:
    # The first outputs for the seed 1234567, as printed by the reference C code.
    states = np.uint64(1234567) + np.arange(5, dtype=np.uint64) * GOLDEN_GAMMA
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_hash_words_depends_on_order_and_broadcasts() -> None:
    grid = hash_words(7, np.arange(3)[:, None], np.arange(4))
    assert grid.shape == (3, 4)
    assert len(np.unique(grid)) == 12
    assert grid[1, 2] == hash_words(7, 1, 2)[0]
    assert hash_words(1, 2)[0] != hash_words(2, 1)[0]
    assert hash_words(-1)[0] == hash_words(2**64 - 1)[0]
