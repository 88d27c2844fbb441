"""Hugging Face data sets as streams, for `--dataset` of commands and for `HFStream`.

A data set may be untrusted. `datasets` runs no code of a data set since version 4, but the data set
chooses its format, and its README the files. Only formats of plain records are therefore accepted,
and a remote data set may not name files on this machine.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_tools.rows.arrow import batch_blocks
from data_tools.rows.block import Block, Field, TextField, missing_column

if TYPE_CHECKING:
    import datasets
    import pyarrow

FORMATS = ("json", "parquet", "arrow", "csv", "text")  # names in `datasets`
_ROWS = 256  # per fetch


def stream_data_set(dataset: str, name: str | None, split: str) -> "datasets.IterableDataset":
    """Opens the records of a data set on the Hub, or in a folder.

    Raises ValueError for formats or files that are not accepted from untrusted sources, and the
    errors of `datasets`, of many unrelated types, if it cannot be opened.
    """
    from datasets import load_dataset_builder  # 0.7 s to import

    builder = load_dataset_builder(dataset, name)
    if builder.name not in FORMATS:
        raise ValueError(f"its format is {builder.name}, not one of {', '.join(FORMATS)}")
    for files in (builder.config.data_files or {}).values():
        for file in files:
            last = file.split("::")[-1]  # "zip://a.json::/data/b.zip" is in the archive b.zip
            if Path(dataset).is_dir():
                folder = os.path.realpath(dataset)
                inside = "://" not in last and os.path.normpath(last).startswith(folder + os.sep)
            else:
                inside = "://" in last and not last.startswith(("file://", "local://"))
            if not inside:
                raise ValueError(f"its README names {last!r:.200}, which lies elsewhere")
    return builder.as_streaming_dataset(split=split)


class HubDataset:
    """The rows of a split, in stored order.

    Shards are made of the files in which the data set is stored, so there are at most as many.
    Resuming reads the current file again up to the position.
    """

    def __init__(
        self,
        dataset: str,
        name: str | None = None,
        *,
        split: str = "train",
        field: Field | None = None,
    ) -> None:
        """Raises ValueError, with the message of `datasets`, if the data set cannot be opened."""
        self.field: Field = field or TextField()
        self._dataset, self._name, self._split = dataset, name, split
        try:
            self._rows = stream_data_set(dataset, name, split)
        except Exception as error:  # `datasets` raises many unrelated types here
            raise ValueError(
                f"{dataset!r} is not a file or folder here, and cannot be opened as a Hugging Face "
                f"data set (name {name!r}, split {split!r}): {error}"
            ) from error
        columns = self._rows.column_names
        if self.field.needed is not None and columns is not None:
            if self.field.needed not in columns:
                raise ValueError(f"{dataset!r} {missing_column(self.field.needed, columns)}")
            self._rows = self._rows.select_columns([self.field.needed])

    @property
    def description(self) -> dict[str, Any]:
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
            batches, place = self._batches(file, files), f"{self._dataset}, file {file}"
            skipped = inner[1] if file == first else 0
            for block in batch_blocks(batches, place, self.field, 0, skipped):
                done = (file - low) / (high - low)
                yield block._replace(position=[file, block.position], fraction=done)

    def _batches(self, file: int, files: int) -> "Iterator[pyarrow.RecordBatch]":
        rows = self._rows.shard(num_shards=files, index=file).with_format("arrow")
        try:
            for table in rows.iter(batch_size=_ROWS):
                yield from table.combine_chunks().to_batches()
        except Exception as error:  # of the network, the file system, the file's format
            raise OSError(
                f"reading {self._dataset!r}, file {file} of {files}, failed ({error!r}): run the "
                "same command again to continue from there"
            ) from error
