"""Measurements on random tokens: copying, induction and recall.

Copying: a random sequence occurs twice, so all but the copy's first token are known. Induction:
A B … A → B (Olsson et al. 2022, arXiv:2209.11895), a single cue at a single distance.
Recall: a fact of random tokens in a long context, asked for at its end (the needle test, Kamradt
2023).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lmlib.data.permutation import hash_words, permute

COPIED = (8, 32, 128)  # tokens of a copied sequence
_COPIED_TARGETS, _LEAST_COPIES = 256, 4  # for each length
DISTANCES = (4, 16, 64, 256)  # of induction, in tokens
_BEFORE, _INDUCTIONS = 2, 32  # tokens before the first A; pieces for each distance
DEPTHS = (10, 50, 90)  # percent of the context before the fact
_CUE, _ANSWER = 4, 8  # tokens of a fact: the part repeated at the end, and the part that counts
_RECALLS, _SHORTEST = 4, 64  # pieces for each depth; tokens


class Piece(NamedTuple):
    """A document of a measurement such as "copying/8"; its targets count from input `first` on."""

    measure: str
    ids: Sequence[int]
    first: int


class RandomIds:
    """Sequences of distinct `ids` that depend only on a seed; ids repeat if there are too few."""

    def __init__(self, ids: Sequence[int], seed: int):
        self._ids, self._seed = np.asarray(ids), seed

    def __call__(self, count: int, *key: int) -> list[int]:
        """Returns the sequence of `count` ids for `key`."""
        size = len(self._ids)
        first = np.arange(min(count, size))
        order = permute(first, size, seed=self._seed, epoch=int(hash_words(*key)[0]))
        return self._ids[np.resize(order, count)].tolist()


def sizes(longest: int, begin: int) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of each measurement for `longest` tokens after `begin` first ones."""
    return {
        "copying": tuple(n for n in COPIED if begin + 2 * n - 1 <= longest),
        "induction": tuple(d for d in DISTANCES if begin + _BEFORE + d + 1 <= longest),
        "recall": DEPTHS if longest >= _SHORTEST else (),
    }


def pieces(
    random_ids: RandomIds, begin: Sequence[int], filler: Sequence[int], longest: int
) -> Iterator[Piece]:
    """Yields the pieces of all three measurements, each starting with `begin`.

    `filler` has ids of a text around facts (random ids if empty). Measurements whose contexts would
    exceed `longest` tokens are left out.
    """
    of = sizes(longest, len(begin))
    for length in of["copying"]:
        for number in range(max(_LEAST_COPIES, _COPIED_TARGETS // length)):
            once = random_ids(length, 0, length, number)
            yield Piece(f"copying/{length}", [*begin, *once, *once], len(begin) + length)
    for distance in of["induction"]:
        for number in range(_INDUCTIONS):
            drawn = random_ids(_BEFORE + distance, 1, distance, number)
            ids = [*begin, *drawn, *drawn[_BEFORE : _BEFORE + 2]]
            yield Piece(f"induction/{distance}", ids, len(ids) - 2)
    for depth in of["recall"]:
        for number in range(_RECALLS):
            fact = random_ids(_CUE + _ANSWER, 2, depth, number)
            room = longest + 1 - len(begin) - 2 * len(fact)
            around = filler or random_ids(room, 3, depth, number)
            text = np.resize(np.roll(around, number * len(around) // _RECALLS), room).tolist()
            before = room * depth // 100
            ids = [*begin, *text[:before], *fact, *text[before:], *fact]
            yield Piece(f"recall/{depth}", ids, len(ids) - 1 - _ANSWER)
