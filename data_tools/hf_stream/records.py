"""Opening a Hugging Face data set, or files, as one of several disjoint streams of records."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from xxhash import xxh3_128, xxh3_128_hexdigest

from data_tools.hugging_face_data import stream_data_set, stream_files

# What `datasets` calls the format of files that end so, before any .gz or .zst.
_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_COMPRESSIONS = (".gz", ".zst")
_LOOKED_INTO, _FIRST_BYTES = 64, 1 << 16  # files, and bytes of each


class Records(Protocol):
    """One pass over a stream: what is used here of `datasets.IterableDataset`."""

    def __iter__(self) -> Iterator[Any]:
        """The records from the beginning, or from the state that was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Where the pass stands after the record that came last; JSON values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the pass go on from such a state."""


OpenRecords = Callable[[int, int], Records]  # of stream i of n


def open_records(
    dataset: str | Sequence[str], name: str | None, split: str, stream: int, streams: int
) -> Records:
    """Stream number `stream` of `streams`, which together hold each record once.

    Where the number of the data set's files is a multiple of `streams`, each stream reads its own
    files; otherwise each reads all of them and keeps one record in `streams`.

    `dataset` is a name on the Hub, a folder, or files: one path or pattern, or several, that end
    in .jsonl, .json, .parquet or .txt, compressed (.gz, .zst) or not.

    Raises ValueError, with what `datasets` says, if it cannot be opened.
    """
    from datasets.distributed import split_dataset_by_node  # 0.7 s to import

    try:
        if (file_format := _file_format(dataset)) is not None:
            files = dataset if isinstance(dataset, str) else list(dataset)
            records = stream_files(file_format, files, split)
        else:
            assert isinstance(dataset, str)  # several names that are no files have no format
            records = stream_data_set(dataset, name, split)
    except Exception as error:  # `datasets` raises many unrelated types here
        raise ValueError(
            f"cannot open {dataset!r} (name {name!r}, split {split!r}) as a Hugging Face data set "
            f"or files: {error}"
        ) from error
    return split_dataset_by_node(records, stream, streams)


def contents(dataset: str | Sequence[str], name: str | None) -> dict[str, str]:
    """The folder of the files that `open_records` reads, with a digest.

    The digest of local files covers names, sizes and the first bytes of some. The digest of remote
    files covers their URLs, which name the commit on the Hub.
    """
    from datasets import load_dataset_builder

    if (file_format := _file_format(dataset)) is None:
        builder = load_dataset_builder(dataset, name)
    else:
        builder = load_dataset_builder(file_format, data_files=dataset)
    splits = (builder.config.data_files or {}).values()
    files = sorted({str(file) for split in splits for file in split})
    if not files or any("://" in file for file in files):
        return {str(dataset): xxh3_128_hexdigest("\n".join(files).encode())}
    digest = xxh3_128()
    folder = os.path.commonpath([os.path.dirname(file) for file in files])
    looked_into = files[:: -(-len(files) // _LOOKED_INTO)]
    for file in files:
        digest.update(f"{os.path.relpath(file, folder)} {os.path.getsize(file)}\n".encode())
    for file in looked_into:
        with open(file, "rb") as content:
            digest.update(content.read(_FIRST_BYTES))
    return {folder: digest.hexdigest()}


def _file_format(dataset: str | Sequence[str]) -> str | None:
    """What `datasets` calls the files' format; `None` for what is no file."""
    last = dataset if isinstance(dataset, str) else dataset[-1]
    for compression in _COMPRESSIONS:
        last = last.removesuffix(compression)
    formats = (kind for suffix, kind in _FORMATS.items() if last.endswith(suffix))
    found = next(formats, None)
    if found is None and not isinstance(dataset, str):
        raise ValueError(f"{last!r} is no file of a known format: {', '.join(_FORMATS)}")
    return found
