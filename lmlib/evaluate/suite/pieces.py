"""What the suite gives a model to read, and which targets of it count."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmlib.data.permutation import hash_words, permute


class Piece(NamedTuple):
    """A document.

    Attributes:
      measure: what it is a part of, such as "copying/8".
      ids: the inputs and, one after them, the last target.
      first: the first input whose target counts.
    """

    measure: str
    ids: Sequence[int]
    first: int


class RandomIds:
    """Sequences of ids that follow from a seed alone.

    Args:
      ids: what is drawn from.
    """

    def __init__(self, ids: Sequence[int], seed: int):
        self._ids, self._seed = np.asarray(ids), seed

    def __call__(self, count: int, *key: int) -> np.ndarray:
        """`count` ids of the sequence `key`, each once; if there are fewer, several times."""
        size = len(self._ids)
        first = np.arange(min(count, size))
        order = permute(first, size, seed=self._seed, epoch=int(hash_words(*key)[0]))
        return self._ids[np.resize(order, count)]
