"""Cuts documents into windows, and packs windows into rows of batches as separate segments.

Shapes: B batch (rows), S sequence.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lmlib.data.batch import TOKEN_BYTES, Batch
from lmlib.hardware.free_memory import check_fits_host


class Window(NamedTuple):
    """A piece of a document at `offset`; targets count from input `first` on."""

    document: int
    ids: np.ndarray
    first: int
    offset: int = 0

    @property
    def inputs(self) -> int:
        return len(self.ids) - 1


class Placed(NamedTuple):
    """A window at inputs [start, start + window.inputs) of a row of a batch."""

    window: Window
    row: int
    start: int


def windows(
    document: int, ids: np.ndarray, sequence_length: int, overlap: int = 0
) -> Iterator[Window]:
    """Yields the windows of a document, which predict each token but the first exactly once.

    Windows of a longer document have `sequence_length` inputs (the last may have fewer), and begin
    with the last `overlap` inputs of the previous window.
    """
    start = 0
    while start + (overlap if start else 0) < len(ids) - 1:
        context = overlap if start else 0
        yield Window(document, ids[start : start + sequence_length + 1], context, start)
        start += sequence_length - overlap


@dataclasses.dataclass(frozen=True)
class Packing:
    """Puts windows into batches; with `packed`, several share a row if they fit, each as a segment.

    Raises MemoryError if a batch does not fit in free memory.
    """

    rows: int
    sequence_length: int
    packed: bool = True

    def __post_init__(self) -> None:
        what = f"a batch of {self.rows:,} × {self.sequence_length:,} tokens"
        check_fits_host(what, self.rows * self.sequence_length * TOKEN_BYTES)

    def batches(self, windows: Iterable[Window]) -> Iterator[tuple[Batch, list[Placed]]]:
        """Yields NumPy batches of equal shape, and the places of the windows in each.

        A window goes into the first row with room; if no row has room, a new batch begins.
        """
        placed: list[Placed] = []
        used_B = [0] * self.rows
        for window in windows:
            row = self._row(window, used_B)
            if row is None:
                yield self._batch(placed), placed
                placed, used_B, row = [], [0] * self.rows, 0
            placed.append(Placed(window, row, used_B[row]))
            used_B[row] += window.inputs
        if placed:
            yield self._batch(placed), placed

    def _row(self, window: Window, used_B: list[int]) -> int | None:
        room = self.sequence_length - window.inputs
        fits = (row for row, used in enumerate(used_B) if used <= (room if self.packed else 0))
        return next(fits, None)

    def _batch(self, placed: list[Placed]) -> Batch:
        shape = self.rows, self.sequence_length
        tokens, targets, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(4))
        loss_mask = np.zeros(shape, bool)
        for number, (window, row, start) in enumerate(placed, start=1):
            here = row, slice(start, start + window.inputs)
            tokens[here], targets[here] = window.ids[:-1], window.ids[1:]
            segment_ids[here] = number
            positions[here] = np.arange(window.inputs)
            loss_mask[row, start + window.first : start + window.inputs] = True
        return Batch(tokens, targets, segment_ids, positions, loss_mask)
