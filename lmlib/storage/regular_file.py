"""Files that may be a stranger's: only stored files are read, inside the folder that they came in.

A pipe could keep a reader waiting for ever, and a device has no end. A link may lead to a private
file of the user's, which would then be copied into a folder that the user publishes.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, opened for reading bytes.

    Raises:
      OSError: if it cannot be opened.
      ValueError: if it is a pipe, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which waits for no writer of a pipe
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no ordinary file")
    return open(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], largest: int) -> bytes:
    """The content of the file; raises as `open_regular`, and ValueError if it has more than
    `largest` bytes."""
    with open_regular(path) as file:
        content = file.read(largest + 1)  # a size that was asked for before may have changed
    if len(content) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content


def check_within_folder(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if `path` is a link that leads out of its folder.

    A snapshot in the cache of `huggingface_hub` is links to the blobs of the same repository,
    models--OWNER--NAME/snapshots/COMMIT/FILE to models--OWNER--NAME/blobs/DIGEST
    (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): these are within.
    """
    path = Path(path)
    folder, file = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    repository = folder.parents[1] if len(folder.parents) > 1 else folder
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
        folder = repository
    if folder not in file.parents:
        raise ValueError(
            f"it is a link to {file}, which is not in its folder: put a copy of the file there "
            "if you want it to be used"
        )
