"""Copying: a random sequence occurs twice, so all but the copy's first token are known."""

from collections.abc import Iterator, Sequence

from lmlib.evaluate.suite.pieces import Piece, RandomIds

LENGTHS = (8, 32, 128)  # tokens of a sequence
_TARGETS = 256  # approximate number for each length
_LEAST = 4  # sequences of each length


def lengths(longest: int, begin: int) -> tuple[int, ...]:
    """Returns the lengths that fit into `longest` tokens after a prefix of `begin` tokens."""
    return tuple(n for n in LENGTHS if begin + 2 * n - 1 <= longest)


def copying(random_ids: RandomIds, begin: Sequence[int], longest: int) -> Iterator[Piece]:
    """Yields `begin` and a sequence twice, as a piece; the copy counts from its second token on."""
    for length in lengths(longest, len(begin)):
        for number in range(max(_LEAST, _TARGETS // length)):
            once = random_ids(length, 0, length, number).tolist()
            yield Piece(f"copying/{length}", [*begin, *once, *once], len(begin) + length)
