"""A keyed permutation of range(size), evaluated point by point in O(1) memory, and epochs of it.

A balanced Feistel network is a bijection of a power-of-four domain whatever its round function
(Luby & Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988).
Cycle walking restricts it to range(size): a point that lands outside is encrypted again until it
lands inside (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The domain
is less than four times the size, so fewer than four walks are expected.

Shape suffixes: B batch (rows of a step), T steps, N rows of all these steps.
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


class SequencesOfSteps:
    """Which sequence each row of a step's batch is.

    The rows of many steps are shuffled at once, which takes hardly longer than those of one step:
    NumPy's calls, and not the rows, take the time.
    """

    _ROWS = 4_096  # at once, or those of one step

    def __init__(self, shuffle: Shuffle, batch_size: int) -> None:
        self._shuffle, self._batch_size = shuffle, batch_size
        self._steps = max(self._ROWS // batch_size, 1)
        self._newest: tuple[int, np.ndarray] = (-1, np.zeros((0, batch_size), np.int64))

    def of_step(self, step: int) -> np.ndarray:
        """The sequences of the step's rows, int64 [B]; -1 for padding."""
        block, place = divmod(step, self._steps)
        known, sequence_TB = self._newest
        if known != block:
            rows = self._steps * self._batch_size
            number_N = block * rows + np.arange(rows)
            sequence_TB = self._shuffle.of_rows(number_N).reshape(self._steps, -1)
            self._newest = block, sequence_TB
        return sequence_TB[place].copy()


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
