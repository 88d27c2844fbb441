"""Inputs of the suite, and the targets that count."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmlib.data.permutation import hash_words, permute


class Piece(NamedTuple):
    """A document.

    Attributes:
      measure: the measurement that it belongs to, such as "copying/8".
      ids: the inputs, followed by the last target.
      first: the first input whose target counts.
    """

    measure: str
    ids: Sequence[int]
    first: int


class RandomIds:
    """Sequences of ids that depend only on a seed.

    Args:
      ids: the ids to draw from.
    """

    def __init__(self, ids: Sequence[int], seed: int):
        self._ids, self._seed = np.asarray(ids), seed

    def __call__(self, count: int, *key: int) -> np.ndarray:
        """Returns `count` distinct ids for the sequence `key`; ids repeat if there are fewer."""
        size = len(self._ids)
        first = np.arange(min(count, size))
        order = permute(first, size, seed=self._seed, epoch=int(hash_words(*key)[0]))
        return self._ids[np.resize(order, count)]
