"""A folder of weights, and the files in it that are read whole.

It may be a stranger's, and some of its files are copied into folders that users publish. So only
files inside it are read, and a file called .json has to hold JSON.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.storage.regular_file import open_regular
from lmlib.storage.stored_json import parse_json
from lmlib.storage.unlinked import check_within_folder

_LARGEST_COPIED = 256 << 20  # bytes; tokenizers of the largest vocabularies have 40 MB


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file of a folder.

    Raises:
      FolderError: if it cannot be read, is no ordinary file, or a link that leads out of the
        folder.
    """
    try:
        check_within_folder(path)
        with open_regular(path) as file:
            yield file
    except FolderError:
        raise
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FolderError(f"{path} cannot be used: {error}") from error


def read_json(path: Path, largest: int = 10_000_000) -> dict[str, Any]:
    """The object in a JSON file of at most `largest` bytes.

    Raises:
      FolderError: if there is none.
    """
    return parsed(path, _read(path, largest))


def parsed(path: Path, text: bytes) -> dict[str, Any]:
    """The object that `text` of the file `path` says; raises FolderError if it says none."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise FolderError(f"{path} is damaged: its JSON cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise FolderError(f"{path} is damaged: its JSON is no object")
    return content


def read_copied(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Those of the files `names` that are in the folder, to be copied.

    Raises:
      FolderError: as `opened` does, or if one is larger than 256 MiB, or is called .json and holds
        no object.
    """
    found = {}
    for path in (folder / name for name in names):
        if path.exists():
            found[path.name] = _read(path, _LARGEST_COPIED)
            if path.suffix == ".json":
                parsed(path, found[path.name])
    return found


def _read(path: Path, largest: int) -> bytes:
    with opened(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise FolderError(f"{path} has more than {largest:,} bytes")
    return content
