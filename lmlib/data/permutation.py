"""The shuffle: a keyed permutation of range(size), evaluated point by point in O(1) memory.

A balanced Feistel network is a bijection of a power-of-four domain for any round function (Luby &
Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988). Cycle
walking restricts it to range(size): a point outside the range is encrypted again until it is inside
(Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The domain is less than
four times the size, so fewer than four passes are expected.

Shape suffixes: B batch (rows of a step), T steps, N rows of all these steps.
"""

import numpy as np

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, rounded to odd
ROUNDS = 12  # 4 are enough for large domains; small ones need more to look uniform


class Shuffle:
    """The sequence for each row of a step, in epochs that contain each sequence once.

    Attributes:
      rows: of an epoch.
    """

    _ROWS = 4_096  # shuffled at once, since NumPy's call overhead dominates

    def __init__(
        self,
        sequences: int,
        batch_size: int,
        together: int = 1,
        seed: int | None = 0,
        epochs: int | None = None,
    ) -> None:
        """Defines the order; see `FlatTokens`. `together` neighbours stay in order."""
        self.rows = -(-sequences // together) * together
        self._sequences, self._together = sequences, together
        self._seed, self._epochs = seed, epochs
        self._batch_size, self._steps = batch_size, max(self._ROWS // batch_size, 1)
        self._newest: tuple[int, np.ndarray] = (-1, np.zeros((0, batch_size), np.int64))

    def of_step(self, step: int) -> np.ndarray:
        """Returns the sequences of the step's rows, int64 [B]; -1 is padding."""
        block, place = divmod(step, self._steps)
        known, sequence_TB = self._newest
        if known != block:
            rows = self._steps * self._batch_size
            sequence_TB = self._of_rows(block * rows + np.arange(rows)).reshape(self._steps, -1)
            self._newest = block, sequence_TB
        return sequence_TB[place].copy()

    def _of_rows(self, number_N: np.ndarray) -> np.ndarray:
        epoch_N, place_N = np.divmod(number_N, self.rows)
        if self._seed is not None:
            group_N, member_N = np.divmod(place_N, self._together)
            groups = self.rows // self._together
            for epoch in np.unique(epoch_N).tolist():
                here = epoch_N == epoch
                group_N[here] = permute(group_N[here], groups, seed=self._seed, epoch=epoch)
            place_N = group_N * self._together + member_N
        there_N = place_N < self._sequences
        if self._epochs is not None:
            there_N &= epoch_N < self._epochs
        return np.where(there_N, place_N, -1)


def permute(points: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns the images of `points` under the permutation of range(size) keyed by (seed, epoch).

    `points` holds integers in [0, size), any shape; the result is int64 of the same shape. The
    order is part of a run's definition: it never changes between versions.
    """
    if not 1 <= size <= 2**63 or not max(seed, epoch) < 2**64 or min(seed, epoch) < 0:
        raise ValueError(f"no permutation has size {size}, seed {seed} and epoch {epoch}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = hash_words(seed, epoch, np.arange(ROUNDS, dtype=np.uint64))
    walked = _feistel(points.astype(np.uint64).ravel(), half_bits, round_keys)
    while (outside := walked >= np.uint64(size)).any():
        walked[outside] = _feistel(walked[outside], half_bits, round_keys)
    return walked.astype(np.int64).reshape(points.shape)


def _feistel(points: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    """Applies the Feistel network on range(4**half_bits); uint64 in and out."""
    shift = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left, right = points >> shift, points & mask
    for key in round_keys:
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return (left << shift) | right


def splitmix64(values: np.ndarray) -> np.ndarray:
    """Returns the SplitMix64 output for each state in `values` (uint64, any shape).

    Source: Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
    """
    mixed = np.asarray(values, np.uint64) + GOLDEN_GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def hash_words(*words: np.ndarray | int) -> np.ndarray:
    """Returns a uint64 hash of words modulo 2**64, broadcast together; their order matters."""
    digest = np.zeros(1, np.uint64)
    for word in words:
        word_64 = np.uint64(word % 2**64) if isinstance(word, int) else word.astype(np.uint64)
        digest = splitmix64(digest ^ word_64)
    return digest
