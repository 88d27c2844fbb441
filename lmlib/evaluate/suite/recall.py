"""Recall: a fact somewhere in a long context, asked for at its end (the needle of Kamradt 2023, but
of random tokens, so that nothing but the context has it)."""

from collections.abc import Iterator, Sequence

import numpy as np

from lmlib.evaluate.suite.pieces import Piece, RandomIds

DEPTHS = (10, 50, 90)  # percent of the context that come before the fact
_CUE, _ANSWER = 4, 8  # tokens of a fact: what is given again at the end, and what counts
_PIECES = 4  # of each depth
_SHORTEST = 64  # tokens


def depths(longest: int) -> tuple[int, ...]:
    """Those asked about where a context has up to `longest` tokens."""
    return DEPTHS if longest >= _SHORTEST else ()


def recall(
    random_ids: RandomIds, begin: Sequence[int], filler: Sequence[int], longest: int
) -> Iterator[Piece]:
    """Contexts of `longest` tokens: `begin`, filler with the fact in it, and the fact once more.

    Args:
      filler: ids of a text, repeated where there are too few; may be empty, then ids are random.
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
