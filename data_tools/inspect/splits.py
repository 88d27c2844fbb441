"""The splits of a data set in this library's format or seqax's, and their tokens by the block."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lmlib.data.metadata import FILE_NAME, shard_folders, shard_number
from lmlib.data.seqax import SeqaxSplit, is_seqax_split
from lmlib.data.stored_split import StoredSplit

BLOCK_LENGTH = 4 * 1024 * 1024  # tokens; a few tens of megabytes in memory


def split_folders(path: Path) -> list[Path]:
    """The splits of the data set `path`, finished or not, or `path` alone if it is a split.

    Raises FileNotFoundError for a folder that is not there, ValueError if it is neither.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no folder {path}")
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: give a data set, or one of its splits")
    if shard_number(path):
        raise ValueError(f"{path} is one shard: give its split, {path.parent}")
    if _is_split(path):
        return [path]
    found = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and _is_split(entry)]
    if not found:
        raise ValueError(f"{path} is neither a data set of flat tokens nor a split of one")
    return found


def open_split(folder: Path) -> StoredSplit | SeqaxSplit:
    """The finished split in `folder`, of either format; raises as `StoredSplit` does."""
    return SeqaxSplit(folder) if is_seqax_split(folder) else StoredSplit(folder)


def blocks(
    stored: StoredSplit | SeqaxSplit, start: int = 0, length: int = BLOCK_LENGTH
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens from `start` on, `length` at a time, and whether each begins a document.

    The next block is on its way while one is used. Raises DamagedDataError.
    """
    pending = None
    for block_start in range(start, stored.tokens, length):
        coming = stored.read(block_start, min(block_start + length, stored.tokens))
        if pending is not None:
            yield pending.result()
        pending = coming
    if pending is not None:
        yield pending.result()


def _is_split(folder: Path) -> bool:
    # A metadata.json without shards is of an older version, which reading it will say.
    return bool(shard_folders(folder) or is_seqax_split(folder) or (folder / FILE_NAME).is_file())
