"""SplitMix64: a 64-bit hash whose every output bit depends on every input bit.

Source: Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014),
with the constants of Stafford's variant 13, as in `java.util.SplittableRandom`.
"""

import numpy as np

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, made odd


def splitmix64(values: np.ndarray) -> np.ndarray:
    """The SplitMix64 output for each state in `values` (uint64, any shape); a bijection.

    Unlike NumPy's generators, whose streams may change between releases, the result is fixed.
    """
    mixed = np.asarray(values, np.uint64) + GOLDEN_GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_words(*words: np.ndarray | int) -> np.ndarray:
    """One uint64 hash of several 64-bit words (broadcast together), sensitive to their order.

    Integers are taken modulo 2**64.
    """
    digest = np.zeros(1, np.uint64)
    for word in words:
        word_64 = np.uint64(word % 2**64) if isinstance(word, int) else word.astype(np.uint64)
        digest = splitmix64(digest ^ word_64)
    return digest
