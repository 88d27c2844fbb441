"""Disjoint streams of records of a data set or of files, with recovery from failures.

A stream that fails or stalls is opened again at the same place.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from xxhash import xxh3_128, xxh3_128_hexdigest

from data_tools.rows.hub import stream_data_set
from lmlib.data.prefetch import ReadAhead

_SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")  # before any .gz or .zst
_LOOKED_INTO, _FIRST_BYTES = 64, 1 << 16  # files to look into, and bytes of each

RECORDS_AHEAD = 256
LONGEST_PAUSE_SECONDS = 60.0


# One pass over stream i of n: an iterable like `datasets.IterableDataset`, with `load_state_dict`
# and `state_dict`, the position after the last record as JSON values.
OpenRecords = Callable[[int, int], Any]


def open_records(
    dataset: str | Sequence[str], name: str | None, split: str, stream: int, streams: int
) -> Any:
    """Opens stream number `stream` of `streams`, which together hold each record once.

    If the number of the data set's files is a multiple of `streams`, each stream reads its own
    files; otherwise each reads all of them and keeps one record in `streams`.

    `dataset` is a name on the Hub, a folder, or files: one path or pattern, or several, that end in
    .jsonl, .json, .parquet or .txt, compressed (.gz, .zst) or not.

    Raises ValueError, with the message of `datasets`, if it cannot be opened.
    """
    from datasets import load_dataset  # 0.7 s to import
    from datasets.distributed import split_dataset_by_node

    try:
        if file_format := _file_format(dataset):
            files = {split: dataset if isinstance(dataset, str) else list(dataset)}
            records = load_dataset(file_format, data_files=files, split=split, streaming=True)
        else:
            records = stream_data_set(str(dataset), name, split)
    except Exception as error:  # `datasets` raises many unrelated types here
        raise ValueError(
            f"cannot open {dataset!r} (name {name!r}, split {split!r}) as a Hugging Face data set "
            f"or files: {error}"
        ) from error
    return split_dataset_by_node(records, stream, streams)


def contents(dataset: str | Sequence[str], name: str | None) -> dict[str, str]:
    """Returns the folder of the files that `open_records` reads, with a digest.

    The digest of local files covers names, sizes and the first bytes of some. The digest of remote
    files covers their URLs, which name the commit on the Hub.
    """
    from datasets import load_dataset_builder

    if file_format := _file_format(dataset):
        builder = load_dataset_builder(file_format, data_files=dataset)
    else:
        builder = load_dataset_builder(dataset, name)
    splits = (builder.config.data_files or {}).values()
    files = sorted({str(file) for split in splits for file in split})
    if not files or any("://" in file for file in files):
        return {str(dataset): xxh3_128_hexdigest("\n".join(files).encode())}
    digest = xxh3_128()
    folder = os.path.commonpath([os.path.dirname(file) for file in files])
    for file in files:
        digest.update(f"{os.path.relpath(file, folder)} {os.path.getsize(file)}\n".encode())
    for file in files[:: -(-len(files) // _LOOKED_INTO)]:
        with open(file, "rb") as content:
            digest.update(content.read(_FIRST_BYTES))
    return {folder: digest.hexdigest()}


def _file_format(dataset: str | Sequence[str]) -> str | None:
    """Returns the files' format name in `datasets`; `None` for a data set."""
    last = dataset if isinstance(dataset, str) else dataset[-1]
    suffix = os.path.splitext(last.removesuffix(".gz").removesuffix(".zst"))[1]
    if suffix in _SUFFIXES:
        return {".jsonl": "json", ".txt": "text"}.get(suffix, suffix[1:])
    if not isinstance(dataset, str):
        raise ValueError(f"{last!r} is not a file of a known format: {', '.join(_SUFFIXES)}")
    return None


class Patience(NamedTuple):
    """Stall timeout and retries of a stream."""

    stall_seconds: float  # seconds without a record
    retries: int  # consecutive, without a record between them
    backoff_seconds: float  # before the first retry; doubled for each further one


class StreamFailure(Exception):
    """A stream failed after all retries."""


class SteadyRecords:
    """Records with the state after each, with recovery from failures of the stream.

    A thread reads them, and is abandoned if it hangs. After a failure, or no record for too long,
    the stream is opened again at the state after the last record.
    """

    def __init__(self, open_records: Callable[[], Any], patience: Patience, what: str) -> None:
        """`open_records` opens the stream at its beginning; `what` names it in messages."""
        self._open_records = open_records
        self._patience = patience
        self._what = what
        self._closed = threading.Event()
        self._reader: ReadAhead[tuple[Any, dict[str, Any]]] | None = None

    def read(self, state: dict[str, Any] | None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields the records to the end of the stream, from `state` on; `None` is its beginning.

        Raises `StreamFailure`, with the last cause, once the retries are used up.
        """
        failures = 0  # consecutive
        reader = self._open(state)
        while not self._closed.is_set():
            try:
                record, state = reader.next(self._patience.stall_seconds)
            except StopIteration:
                return
            except Exception as error:
                reader.close()
                failures += 1
                self._pause(failures, error)
                reader = self._open(state)
            else:
                failures = 0
                yield record, state

    def close(self, seconds: float = 0.0) -> None:
        """Ends `read`, which may run in another thread, and the reading thread.

        Waits at most `seconds` for the thread, and then abandons it.
        """
        self._closed.set()
        if self._reader is not None:
            self._reader.close(seconds)

    def _open(self, state: dict[str, Any] | None) -> ReadAhead[tuple[Any, dict[str, Any]]]:
        reading = self._reading(state)
        self._reader = ReadAhead(reading, RECORDS_AHEAD, name=f"records of {self._what}")
        if self._closed.is_set():  # by another thread, which may have missed this reader
            self._reader.close()
        return self._reader

    def _pause(self, failures: int, error: Exception) -> None:
        """Prints the failure and waits; raises `StreamFailure` after too many failures."""
        retries, cause = self._patience.retries, f"{type(error).__name__}: {error}"
        cause = " ".join(cause.split())
        if failures > retries:
            raise StreamFailure(
                f"{self._what} failed {failures} times in a row, at last with {cause}"
            ) from error
        pause = min(self._patience.backoff_seconds * 2 ** (failures - 1), LONGEST_PAUSE_SECONDS)
        line = f"{self._what}: {cause}; retry {failures} of {retries} in {pause:g} s"
        print(line, file=sys.stderr, flush=True)
        self._closed.wait(pause)

    def _reading(self, state: dict[str, Any] | None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Opens the stream again each time: a hanging thread may still advance the old one."""
        records = self._open_records()
        if state is not None:
            records.load_state_dict(state)
        for record in records:
            yield record, records.state_dict()
