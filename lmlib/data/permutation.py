"""A keyed permutation of range(size), evaluated point by point in O(1) memory.

A balanced Feistel network is a bijection of a power-of-four domain whatever its round function
(Luby & Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988).
Cycle walking restricts it to range(size): a point that lands outside is encrypted again until it
lands inside (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The domain
is less than four times the size, so fewer than four walks are expected.
"""

import numpy as np

from lmlib.data.splitmix64 import hash_words, splitmix64

ROUNDS = 12  # 4 are enough for large domains; small ones need more to look uniform


def permute(points: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where the permutation of range(size) keyed by (seed, epoch) sends each of `points`.

    `points` holds integers in [0, size), any shape; the result is int64 of the same shape.
    The order is part of a run's definition: it never changes between versions.

    Raises ValueError for a size outside [1, 2**63], a point outside the range, or a seed or
    epoch outside [0, 2**64).
    """
    if not 1 <= size <= 2**63:
        raise ValueError(f"a permutation's size must be in [1, 2**63], not {size}")
    for name, word in (("seed", seed), ("epoch", epoch)):
        if not 0 <= word < 2**64:
            raise ValueError(f"a permutation's {name} must be in [0, 2**64), not {word}")
    points = np.asarray(points)
    if points.size and not (points.min() >= 0 and int(points.max()) < size):
        raise ValueError(f"points must lie in [0, {size}), not [{points.min()}, {points.max()}]")

    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = hash_words(seed, epoch, np.arange(ROUNDS, dtype=np.uint64))
    walked = _feistel(points.astype(np.uint64).ravel(), half_bits, round_keys)
    while (outside := walked >= np.uint64(size)).any():
        walked[outside] = _feistel(walked[outside], half_bits, round_keys)
    return walked.astype(np.int64).reshape(points.shape)


def _feistel(points: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    """The Feistel network on range(4**half_bits); uint64 in and out."""
    shift = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left, right = points >> shift, points & mask
    for key in round_keys:
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return (left << shift) | right
