"""Files on a disk or in a bucket, behind one interface for reading, and the one for disks."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lmlib.storage.unlinked import LinkError, unlinked

_PIECE = 1 << 20  # bytes
_DELETED_ON_NFS = re.compile(r"\.nfs[0-9a-f]+")


@runtime_checkable
class Store(Protocol):
    """The files below one folder, by names such as `state/model.norm/0`.

    A file is complete or absent. A failure raises OSError with a message that names the folder.
    """

    def list(self, under: str = "") -> dict[str, int | None]:
        """Returns the names of all files below the folder `under`, with their sizes in bytes.

        Names are relative to the store. A size is `None` if it takes another request.
        """

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes [start, stop) of a file, or fewer at its end.

        Raises FileNotFoundError if there is no such file.
        """

    def pieces(self, name: str, into: memoryview | None = None) -> Iterator[bytes | memoryview]:
        """Yields the bytes of a file in order; a piece is valid until the next.

        The bytes that fit go into the buffer `into`. Raises as `read`.
        """


class NotAFileError(ValueError):
    """A link, a pipe or a device among the files of a folder.

    Attributes:
      name: relative to the folder.
    """

    def __init__(self, name: str):
        super().__init__(f"{name} is a link or no ordinary file")
        self.name = name


class FolderStore:
    """Files below `folder`. The folder may be a link, but not the files and folders below it."""

    def __init__(self, folder: Path):
        self._folder = folder

    def list(self, under: str = "") -> dict[str, int | None]:
        """See `Store`. Leaves out deleted files that NFS keeps because they were open.

        Raises NotAFileError for a link or a device.
        """
        sizes: dict[str, int | None] = {}
        pending = [f"{under}/" if under else ""]
        while pending:
            prefix = pending.pop()
            for entry in os.scandir(self._folder / prefix):
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{name}/")
                elif _DELETED_ON_NFS.fullmatch(entry.name):
                    continue
                elif entry.is_file(follow_symlinks=False):
                    sizes[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    raise NotAFileError(name)
        return sizes

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store`."""
        with self._opened(name, -1) as file:
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def pieces(self, name: str, into: memoryview | None = None) -> Iterator[bytes | memoryview]:
        """See `Store`; a piece has at most 1 MiB."""
        size = 0
        piece = memoryview(bytearray(_PIECE)) if into is None else into[:_PIECE]
        with self._opened(name, 0) as file:
            while count := file.readinto(piece):
                yield piece[:count]
                size += count
                if into is not None:
                    piece = into[size : size + _PIECE]

    def _opened(self, name: str, buffering: int) -> Any:
        """Raises NotAFileError for a pipe, a device or a link, also among the parent folders."""
        try:
            unlinked(self._folder, name)
        except LinkError as error:
            raise NotAFileError(name) from error

        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

        try:
            file = open(self._folder / name, "rb", buffering, opener=opener)  # noqa: SIM115
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotAFileError(name) from error
            raise
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise NotAFileError(name)
        return file
