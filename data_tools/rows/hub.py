"""A Hugging Face data set, streamed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from data_tools.hugging_face_data import stream_data_set
from data_tools.rows.arrow import batch_blocks
from data_tools.rows.block import Block, Field, TextField

if TYPE_CHECKING:
    import pyarrow

_ROWS = 256  # fetched at once


class HubDataset:
    """The rows of a split, in its stored order.

    Shards are made of the files that the data set is stored in, so there are at most so many.
    Going on in the middle reads the file at hand again up to there. No code from the Hub is run.
    """

    def __init__(
        self,
        dataset: str,
        name: str | None = None,
        *,
        split: str = "train",
        field: Field | None = None,
    ) -> None:
        """Raises ValueError, with what `datasets` says, if the data set cannot be opened."""
        self.field: Field = field or TextField()
        self._dataset, self._name, self._split = dataset, name, split
        try:
            self._rows = stream_data_set(dataset, name, split)
        except Exception as error:  # `datasets` raises many unrelated types here
            raise ValueError(
                f"{dataset!r} is no file or folder here, and cannot be opened as a Hugging Face "
                f"data set (name {name!r}, split {split!r}): {error}"
            ) from error
        columns = self._rows.column_names
        if self.field.needed is not None and columns is not None:
            if self.field.needed not in columns:
                raise ValueError(
                    f"{dataset!r} has no column {self.field.needed!r}; it has "
                    f"{', '.join(map(repr, columns))}: choose one with --text_column"
                )
            self._rows = self._rows.select_columns([self.field.needed])

    @property
    def description(self) -> dict[str, Any]:
        """See `RowSource.description`."""
        return {
            "datasets": [self._dataset],
            "name": self._name,
            "split": self._split,
            "text": self.field.description,
            "files": self._rows.num_shards,
        }

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """See `RowSource.blocks`.

        Raises ValueError for more shards than the data set has files, OSError if reading fails.
        """
        files = self._rows.num_shards
        if shards > files:
            raise ValueError(
                f"{self._dataset!r} is stored in {files} files, which cannot make {shards} shards: "
                f"ask for {files} or fewer"
            )
        low, high = files * shard // shards, files * (shard + 1) // shards
        first, inner = position or (low, [0, 0])
        for file in range(first, high):
            skipped = inner[1] if file == first else 0
            batches = self._batches(file, files)
            for block in batch_blocks(batches, self._dataset, f"file {file}, ", 0, skipped):
                done = (file - low) / (high - low)
                yield replace(block, position=[file, block.position], fraction=done)

    def _batches(self, file: int, files: int) -> "Iterator[pyarrow.RecordBatch]":
        rows = self._rows.shard(num_shards=files, index=file).with_format("arrow")
        try:
            for table in rows.iter(batch_size=_ROWS):
                yield from table.combine_chunks().to_batches()
        except Exception as error:  # of the network, the file system, the file's format
            raise OSError(
                f"reading {self._dataset!r}, file {file} of {files}, failed ({error!r}): run the "
                "same command again to go on from there"
            ) from error
