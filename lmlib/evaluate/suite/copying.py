"""Copying: a random sequence given twice. The second time, all but its first token is known."""

from collections.abc import Iterator, Sequence

from lmlib.evaluate.suite.pieces import Piece, RandomIds

LENGTHS = (8, 32, 128)  # tokens of a sequence
_TARGETS = 256  # of each length, about
_LEAST = 4  # sequences of each length


def lengths(longest: int, begin: int) -> tuple[int, ...]:
    """Those that fit into `longest` tokens, of which `begin` come first."""
    return tuple(n for n in LENGTHS if begin + 2 * n - 1 <= longest)


def copying(random_ids: RandomIds, begin: Sequence[int], longest: int) -> Iterator[Piece]:
    """Each sequence twice, after `begin`; the second copy counts, from its second token on."""
    for length in lengths(longest, len(begin)):
        for number in range(max(_LEAST, _TARGETS // length)):
            once = random_ids(length, 0, length, number).tolist()
            yield Piece(f"copying/{length}", [*begin, *once, *once], len(begin) + length)
