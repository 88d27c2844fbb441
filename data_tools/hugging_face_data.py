"""Opening a Hugging Face data set, which may be a stranger's, as a stream of records.

`datasets` runs no code of a data set since version 4. But the data set chooses the format, and its
README the files: here only formats of plain records, and no file of this machine from elsewhere.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets

FORMATS = ("json", "parquet", "arrow", "csv", "text")  # as `datasets` calls them


def stream_data_set(dataset: str, name: str | None, split: str) -> "datasets.IterableDataset":
    """The records of a data set on the Hub, or in a folder.

    Raises ValueError for formats or files that are not taken from strangers, and what `datasets`
    raises, of many unrelated types, if it cannot be opened.
    """
    from datasets import load_dataset_builder  # 0.7 s to import

    builder = load_dataset_builder(dataset, name)
    if builder.name not in FORMATS:
        raise ValueError(f"its format is {builder.name}, not one of {', '.join(FORMATS)}")
    for files in (builder.config.data_files or {}).values():
        for file in files:
            _check_place(file, dataset)
    return builder.as_streaming_dataset(split=split)


def stream_files(
    file_format: str, files: str | Sequence[str], split: str
) -> "datasets.IterableDataset":
    """The records of files in one of the `FORMATS`; raises what `datasets` does."""
    from datasets import load_dataset

    return load_dataset(file_format, data_files={split: files}, split=split, streaming=True)


def _check_place(file: str, dataset: str) -> None:
    """Raises ValueError for a file that is not the data set's own, or not on the network."""
    last = file.split("::")[-1]  # "zip://a.json::/data/b.zip" is in the archive b.zip
    if Path(dataset).is_dir():
        folder = os.path.realpath(dataset)
        inside = "://" not in last and os.path.normpath(last).startswith(folder + os.sep)
    else:
        inside = "://" in last and not last.startswith(("file://", "local://"))
    if not inside:
        raise ValueError(f"its README names {last!r:.200}, which lies elsewhere")
