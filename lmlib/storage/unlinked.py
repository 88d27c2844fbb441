"""Safe access to untrusted folders: links are refused, and only regular files are read.

A link could lead to a private file of the user's, which would then be published with the folder, or
shown on a page of runs. A pipe could block a reader forever, and a device has no end.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO


class LinkError(OSError, ValueError):
    """A link in place of a run's own file or folder."""


def unlinked(folder: str | os.PathLike[str], name: str = "") -> Path:
    """Returns `folder / name` after checking that no part of it below `folder` is a link.

    The folder itself may be a link. The path need not exist.

    Raises:
      LinkError: with the link's path and a remedy.
    """
    path = Path(folder)
    for part in Path(name).parts:
        path = path / part
        check_no_link(path)
    return path


def check_no_link(path: Path) -> None:
    """Raises LinkError, with a remedy, if the file or folder is a link."""
    if path.is_symlink():
        raise LinkError(
            f"{path} is a link, which is not followed in a run's folder: replace it by a copy of "
            "its target"
        )


def check_within_folder(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if `path` is a link that leads out of its folder.

    A snapshot in the cache of `huggingface_hub` consists of links to the blobs of the same
    repository, models--OWNER--NAME/snapshots/COMMIT/FILE to models--OWNER--NAME/blobs/DIGEST
    (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): these are allowed.
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


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens the file for reading bytes.

    Raises:
      OSError: if it cannot be opened.
      ValueError: if it is a pipe, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # doesn't wait for a pipe's writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return open(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], largest: int) -> bytes:
    """Returns the content of the file.

    Raises as `open_regular`, and ValueError if it has more than `largest` bytes.
    """
    with open_regular(path) as file:
        content = file.read(largest + 1)  # a size checked before may have changed
    if len(content) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content
