"""Checks a folder of weights, and reads its small files.

The folder is untrusted, and some of its files are copied into folders that users publish. So only
files inside it are read, and files named .json must contain JSON.
"""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lmlib.models.families.hugging_face.settings import FolderError
from lmlib.storage.hub_cache import check_within_folder
from lmlib.storage.stored_json import parse_json
from lmlib.storage.unlinked import open_regular

_LARGEST_COPIED = 256 << 20  # bytes; tokenizers of the largest vocabularies have 40 MB


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file of a folder.

    Raises FolderError if it cannot be read, is not a regular file, or is a link that points outside
    the folder.
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
    """Returns the object in a JSON file of at most `largest` bytes.

    Raises FolderError if the file does not contain one.
    """
    return parsed(path, _read(path, largest))


def parsed(path: Path, text: bytes) -> dict[str, Any]:
    """Parses `text` of the file `path` as a JSON object; raises FolderError if it is none."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise FolderError(f"{path} is damaged: its JSON cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise FolderError(f"{path} is damaged: its JSON is not an object")
    return content


def read_copied(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Reads those files `names` that exist in the folder, for copying.

    Raises FolderError as `opened`, or if a file is larger than 256 MiB, or is named .json and does
    not contain an object.
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
