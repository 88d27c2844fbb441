"""An array of an unfinished shard with one element for each token: it grows by whole files."""

from pathlib import Path

import numpy as np

from lmlib.data.stored.digests import CHUNK_DIGESTS, digests_of_chunks
from lmlib.data.stored.journal import NumberFile, writing
from lmlib.data.stored.token_arrays import append, create_array, open_for_appending


class GrowingArray:
    """Elements on disk, in whole files, and those that do not fill one yet."""

    def __init__(
        self,
        folder: Path,
        dtype: type[np.number],
        *,
        written: int | None,
        file_length: int,
        chunk_length: int,
    ) -> None:
        """Begins the array in `folder`, or goes on after its first `written` elements.

        Raises ValueError or OSError if there are fewer, or they are not laid out as they should be.
        """
        self._folder, self._dtype, self._chunk_length = folder, dtype, chunk_length
        if written is None:
            self._array = create_array(
                folder, dtype, chunk_length=chunk_length, file_length=file_length
            )
        self._digests = NumberFile(
            folder / CHUNK_DIGESTS, (written or 0) // chunk_length, folder.parent
        )
        if written is not None:
            self._array = open_for_appending(folder, written)
        self._stored_before = written or 0
        self._buffer: list[np.ndarray] = []
        self.buffered = 0  # elements

    def add(self, values: np.ndarray, start: int) -> None:
        """Keeps `values`, the elements from `start` on, but for those on disk already.

        Raises ValueError if others are on disk.
        """
        values = values.astype(self._dtype, copy=False)
        again = min(max(self._stored_before - start, 0), len(values))
        if again:
            stored = self._array[start : start + again].read().result()
            if not np.array_equal(stored, values[:again]):
                raise ValueError(
                    f"the documents differ from those that {self._folder.parent} was begun with: "
                    "the source or the tokenizer has changed; delete it to make the shard anew"
                )
        self._buffer.append(values[again:])
        self.buffered += len(values) - again

    def write(self, length: int) -> None:
        """Writes the first `length` elements that are kept: whole files, or the last ones."""
        buffered = np.concatenate([np.zeros(0, self._dtype), *self._buffer])
        if length:
            self._array = append(self._folder, self._array, buffered[:length])
            with writing(self._folder.parent):
                self._digests.append(digests_of_chunks(buffered[:length], self._chunk_length))
        self._buffer, self.buffered = [buffered[length:]], len(buffered) - length
