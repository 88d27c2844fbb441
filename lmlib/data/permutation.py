"""A keyed permutation of range(size), evaluated point by point in O(1) memory, and epochs of it.

A balanced Feistel network is a bijection of a power-of-four domain whatever its round function
(Luby & Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988).
Cycle walking restricts it to range(size): a point that lands outside is encrypted again until it
lands inside (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The domain
is less than four times the size, so fewer than four walks are expected.

Shape suffixes: B batch (rows).
"""

from dataclasses import dataclass

import numpy as np

from lmlib.data.splitmix64 import hash_words, splitmix64

ROUNDS = 12  # 4 are enough for large domains; small ones need more to look uniform


@dataclass(frozen=True)
class Shuffle:
    """Which sequence each row of a data set is, in epochs that have each sequence once.

    Args:
      sequences: in an epoch.
      together: neighbours that are shuffled as one, and follow each other in order. Where they do
        not divide `sequences`, rows in place of those that the last of them lack are padding.
      seed: of the order; None keeps the sequences as they are numbered.
      epochs: rows past so many are padding; None never ends.
    """

    sequences: int
    together: int = 1
    seed: int | None = 0
    epochs: int | None = None

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return -(-self.sequences // self.together) * self.together

    def of_rows(self, number_B: np.ndarray) -> np.ndarray:
        """The sequence that each row is, int64; -1 for padding. Rows count on over epochs."""
        epoch_B, place_B = np.divmod(number_B, self.rows)
        if self.seed is not None:
            group_B, member_B = np.divmod(place_B, self.together)
            groups = self.rows // self.together
            for epoch in np.unique(epoch_B).tolist():
                here = epoch_B == epoch
                group_B[here] = permute(group_B[here], groups, seed=self.seed, epoch=epoch)
            place_B = group_B * self.together + member_B
        there_B = place_B < self.sequences
        if self.epochs is not None:
            there_B &= epoch_B < self.epochs
        return np.where(there_B, place_B, -1)


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
