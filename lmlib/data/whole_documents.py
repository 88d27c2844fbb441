"""Rows that begin with a document. Only documents longer than a row are cut.

Shape suffixes: U units (a document, or a pair of them), R rows.
"""

from dataclasses import dataclass

import numpy as np

from lmlib.data.stored.metadata import IN_TWOS, DamagedDataError
from lmlib.data.stored.split import StoredSplit


@dataclass(frozen=True)
class WholeDocuments:
    """Units of neighbouring documents, packed into rows; depends only on the lengths.

    Memory holds up to three numbers per unit, 24 MB per million.
    """

    edges_U: np.ndarray  # int64 [units + 1]: token offset of each start, and of the last end
    units_U: np.ndarray  # int64 [units]: the units, row by row
    first_R: np.ndarray  # int64 [rows + 1]: index in `units_U` of each row's first unit
    capacity: int  # tokens of a row

    @property
    def rows(self) -> int:
        """Number of rows that hold all units once."""
        return len(self.first_R) - 1

    def spans(self, row: int) -> list[tuple[int, int]]:
        """Returns the tokens of `row`, as [start, stop) of each unit in it."""
        units = self.units_U[self.first_R[row] : self.first_R[row + 1]]
        starts = self.edges_U[units]
        stops = np.minimum(self.edges_U[units + 1], starts + self.capacity)
        return list(zip(starts.tolist(), stops.tolist(), strict=True))


def whole_documents(
    stored: StoredSplit, folder: str, capacity: int, packed: bool
) -> WholeDocuments:
    """Packs a split's documents, or its pairs of documents, into rows of at most `capacity` tokens.

    Raises ValueError if documents that must not be cut are too long, DamagedDataError if documents
    do not form pairs.
    """
    edges = stored.edges()
    content = "text" if stored.metadata is None else stored.metadata.content
    unread = 0 if content in IN_TWOS else 1  # tokens of a row that are no inputs
    if content in IN_TWOS:
        if (np.diff(edges) < 2).any():
            raise DamagedDataError(f"{folder} holds documents of fewer than two tokens in pairs")
        edges = edges[::2]
    lengths_U = np.diff(edges)
    too_long = int((lengths_U > capacity).sum())
    if content != "text" and too_long:
        raise ValueError(
            f"{too_long:,} of the {content} in {folder} have more than sequence_length"
            f"{' + 1' if unread else ''} = {capacity:,} tokens, the longest {lengths_U.max():,}, "
            f"and none is ever cut: take a sequence_length of {lengths_U.max() - unread:,}, or "
            f"prepare the data again with --max_length={capacity}"
        )
    return arranged(edges, capacity, packed)


def arranged(edges_U: np.ndarray, capacity: int, packed: bool) -> WholeDocuments:
    """Packs units into rows of at most `capacity` tokens; if not `packed`, one unit per row.

    A unit longer than a row is cut to its first `capacity` tokens.
    """
    lengths_U = np.minimum(np.diff(edges_U), capacity)
    if not packed:
        units_U = np.arange(len(lengths_U))
        return WholeDocuments(edges_U, units_U, np.arange(len(edges_U)), capacity)
    row_U = best_fit_decreasing(lengths_U, capacity)
    rows = int(row_U.max(initial=-1)) + 1
    units_U = np.argsort(row_U, kind="stable")  # stored order within a row
    first_R = np.searchsorted(row_U[units_U], np.arange(rows + 1))
    return WholeDocuments(edges_U, units_U, first_R, capacity)


def best_fit_decreasing(lengths_U: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the row of each unit: the longest first, each into the fullest row with room.

    Ties between units go to the one stored first, ties between rows to the newest. It takes at most
    11/9 of the minimal number of rows, plus 4: Johnson et al., "Worst-case performance bounds for
    simple one-dimensional packing algorithms" (1974). If most units are short, all rows except the
    last are full. A million units take about a second.
    """
    row_U = np.zeros(len(lengths_U), np.int64)
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by free tokens
    some = 0  # bit n is set if a row has n free tokens
    rows = 0
    lengths = lengths_U.tolist()
    for unit in np.argsort(-lengths_U, kind="stable").tolist():
        length = lengths[unit]
        enough = some >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                some ^= 1 << room
        else:
            room, row = capacity, rows
            rows += 1
        row_U[unit] = row
        with_room[room - length].append(row)
        some |= 1 << (room - length)
    return row_U
