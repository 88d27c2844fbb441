"""Recall: a fact in a long context, asked for at its end (the needle test, Kamradt 2023).

The fact consists of random tokens, so it can only be known from the context.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from lmlib.evaluate.suite.pieces import Piece, RandomIds

DEPTHS = (10, 50, 90)  # percent of the context before the fact
_CUE, _ANSWER = 4, 8  # tokens of a fact: the part repeated at the end, and the part that counts
_PIECES = 4  # for each depth
_SHORTEST = 64  # tokens


def depths(longest: int) -> tuple[int, ...]:
    """Returns the depths to test in contexts of up to `longest` tokens."""
    return DEPTHS if longest >= _SHORTEST else ()


def recall(
    random_ids: RandomIds, begin: Sequence[int], filler: Sequence[int], longest: int
) -> Iterator[Piece]:
    """Yields contexts of `longest` tokens: `begin`, filler with a fact, and the fact again.

    Args:
      filler: ids of a text, repeated if it is too short; if empty, random ids are used.
    """
    for depth in depths(longest):
        for number in range(_PIECES):
            fact = random_ids(_CUE + _ANSWER, 2, depth, number).tolist()
            room = longest + 1 - len(begin) - 2 * len(fact)
            ids = filler or random_ids(room, 3, depth, number).tolist()
            text = np.resize(np.roll(ids, number * len(ids) // _PIECES), room).tolist()
            before = room * depth // 100
            whole = [*begin, *text[:before], *fact, *text[before:], *fact]
            yield Piece(f"recall/{depth}", whole, len(whole) - 1 - _ANSWER)
