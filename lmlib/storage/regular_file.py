"""Safe reading of untrusted files: only regular files are read, and only inside their folder.

A pipe could block a reader forever, and a device has no end. A link may lead to a private file of
the user's, which would then be copied into a published folder.
"""

import os
import stat
from typing import BinaryIO


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
