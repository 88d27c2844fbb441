"""Files that may be a stranger's: only stored files are read, inside the folder that they came in.

A pipe could keep a reader waiting for ever, and a device has no end. A link may lead to a private
file of the user's, which would then be copied into a folder that the user publishes.
"""

import os
import stat
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
