"""A file to which a process appends until it ends."""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.failures import storage_failure


class AppendedFile:
    """Appends to a file; bytes that the storage refuses are kept and tried again.

    If the file is deleted, or replaced as editors and `sed -i` do, it can be restored with
    everything that was written to it. A file in its place is then renamed.
    """

    def __init__(
        self,
        path: Path,
        content: str,
        lost: Callable[[str], None] | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        """Begins with `content`, durably; an earlier file with that name is replaced.

        Args:
          lost: called before the file is restored, with a text that gives the reason. It prevents
            that by raising; `None` never restores the file.
          check: called before the file is put in place, as in `write_atomically`.
        """
        self._path, self._lost, self._check = path, lost, check
        self._unwritten = b""
        self._mutex = threading.Lock()  # guards the open file, which another thread may sync
        write_atomically(path, content, check)
        self._file = path.open("r+b", buffering=0)
        self._file.seek(0, os.SEEK_END)

    def append(self, content: bytes, over: int = 0) -> None:
        """Writes `content` at the end, replacing the last `over` bytes.

        Errors are raised by `flush`.
        """
        if self._unwritten:
            self._unwritten = self._unwritten[: len(self._unwritten) - over] + content
        else:
            with contextlib.suppress(OSError):
                self._put_back()
            self._file.seek(-over, os.SEEK_END)
            self._unwritten = content
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Writes pending bytes; raises OSError, naming the file, if that fails or it is lost."""
        with self._named_errors():
            self._put_back()
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._unwritten = self._unwritten[written:]

    def sync(self) -> None:
        """Returns once everything flushed is on the disk. May be called from another thread.

        Raises OSError; the error names the file.
        """
        with self._mutex, self._named_errors():
            if not self._file.closed:  # closing has synced it
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes, syncs and closes the file; then raises OSError if one of them failed."""
        try:
            self.flush()
            self.sync()
        finally:
            with self._mutex:
                self._file.close()

    def _put_back(self) -> None:
        if self._lost is None:
            return
        opened = self._file.fileno()
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(opened)):
                return
        exchanged = os.path.lexists(self._path)
        self._lost(f"{self._path} was {'exchanged for another file' if exchanged else 'deleted'}")
        if exchanged:
            set_aside(self._path)
        with self._mutex:
            write_atomically(self._path, os.pread(opened, os.fstat(opened).st_size, 0), self._check)
            place = self._file.tell()
            self._file.close()
            self._file = self._path.open("r+b", buffering=0)
            self._file.seek(place)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            code = error.errno or errno.EIO
            raise storage_failure(f"write {self._path}", self._path.parent, code) from error


def set_aside(path: Path) -> Path:
    """Renames the file to its name with `.1`, or the next free number."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return path.rename(next(aside for aside in numbered if not aside.exists()))
