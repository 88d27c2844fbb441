"""Reading all of an array file by file, so that every damaged file is found and not just one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_tools.inspect.splits import BLOCK_LENGTH
from lmlib.data.token_arrays import DamagedDataError, StoredArray, reading_context


@dataclass(frozen=True)
class Damage:
    """Something in a data set that is not as it should be."""

    path: Path  # the file, or the folder of the array or shard
    reason: str


Report = Callable[[Damage], None]


class ArrayFiles:
    """A one-dimensional zarr3 or zarr2 array, as its files hold it."""

    def __init__(self, path: Path, length: int, driver: str = "zarr3") -> None:
        """Opens it; raises DamagedDataError as `StoredArray` does.

        `driver` is TensorStore's name for the format, "zarr3" or "zarr".
        """
        self._path = path
        self._stored = StoredArray(path, length, reading_context(), driver)
        self._stored.check_claim()
        self.chunk_length = self._stored.chunk_length
        self.length = length

    def blocks(self, report: Report, on_read: Callable[[int], None]) -> Iterator[np.ndarray]:
        """Its values in order, a few million at a time, without those of damaged files.

        Each damaged file goes to `report`, once; `on_read` hears how many values were tried.
        """
        layout = self._stored.layout
        for number, start in enumerate(range(0, self.length, layout.file_length)):
            stop = min(start + layout.file_length, self.length)
            for first in range(start, stop, BLOCK_LENGTH):
                last = min(first + BLOCK_LENGTH, stop)
                try:
                    values = self._stored.read(first, last).result()
                except DamagedDataError as error:
                    report(self._damage(layout.folder / str(number), error))
                    on_read(stop - first)
                    break
                yield values
                on_read(last - first)

    def _damage(self, file: Path, error: DamagedDataError) -> Damage:
        return Damage(file, "is missing" if not file.exists() else cause_of(error))


def cause_of(error: Exception) -> str:
    """What TensorStore found wrong, in one line without its settings."""
    return str(error.__cause__ or error).partition(" [")[0]
