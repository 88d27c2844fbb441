"""Stretches of a split, to look at."""

from dataclasses import dataclass

import numpy as np

from lmlib.data.seqax import SeqaxSplit
from lmlib.data.stored_split import StoredSplit


@dataclass(frozen=True)
class Sample:
    """Consecutive tokens of a split."""

    start: int  # of the first, in the split
    begins_document: bool  # whether the first one does
    pieces: tuple[tuple[int, ...], ...]  # the ids, cut where a document begins

    @property
    def stop(self) -> int:
        return self.start + sum(map(len, self.pieces))


def samples(
    stored: StoredSplit | SeqaxSplit, count: int, length: int = 100, seed: int = 0
) -> list[Sample]:
    """`count` stretches of `length` tokens from random places; the same `seed`, the same places.

    A split shorter than `length` gives itself once. Raises DamagedDataError.
    """
    places = max(stored.tokens - length, 0) + 1
    chosen = np.random.default_rng(seed).integers(places, size=count)
    return [_sample(stored, start, length) for start in np.unique(chosen).tolist()]


def _sample(stored: StoredSplit | SeqaxSplit, start: int, length: int) -> Sample:
    tokens, begins = stored.read(start, min(start + length, stored.tokens)).result()
    pieces = [piece for piece in np.split(tokens, np.flatnonzero(begins)) if len(piece)]
    return Sample(
        start=start,
        begins_document=bool(begins[:1].any()),
        pieces=tuple(tuple(piece.tolist()) for piece in pieces),
    )
