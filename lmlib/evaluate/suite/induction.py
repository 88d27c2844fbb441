"""Induction: A B … A → B (Olsson et al. 2022, arXiv:2209.11895), among random tokens.

In contrast to copying, there is a single cue, at a single distance.
"""

from collections.abc import Iterator, Sequence

from lmlib.evaluate.suite.pieces import Piece, RandomIds

DISTANCES = (4, 16, 64, 256)  # from one A to the other, in tokens
_BEFORE = 2  # tokens before the first A
_PIECES = 32  # for each distance


def distances(longest: int, begin: int) -> tuple[int, ...]:
    """Returns the distances that fit into `longest` tokens after a prefix of `begin` tokens."""
    return tuple(d for d in DISTANCES if begin + _BEFORE + d + 1 <= longest)


def induction(random_ids: RandomIds, begin: Sequence[int], longest: int) -> Iterator[Piece]:
    """Yields pieces of distinct tokens, in which only A and B are repeated; the second B counts."""
    for distance in distances(longest, len(begin)):
        for number in range(_PIECES):
            drawn = random_ids(_BEFORE + distance, 1, distance, number).tolist()
            ids = [*begin, *drawn, *drawn[_BEFORE : _BEFORE + 2]]
            yield Piece(f"induction/{distance}", ids, len(ids) - 2)
