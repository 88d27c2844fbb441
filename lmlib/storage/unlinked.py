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

    The folder itself may be a link. The path need not exist. Raises LinkError, with a remedy.
    """
    path = Path(folder)
    for part in Path(name).parts:
        path = path / part
        check_no_link(path)
    return path


def check_no_link(*paths: Path) -> None:
    """Raises LinkError, with a remedy, if one of the files or folders is a link."""
    for path in paths:
        if path.is_symlink():
            raise LinkError(
                f"{path} is a link, which is not followed: replace it by a copy of its target"
            )


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens the file for reading bytes.

    Raises OSError if it cannot be opened, ValueError if it is a pipe, a device or a folder.
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
