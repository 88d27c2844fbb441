"""Local cache of array chunks in buckets, so that each is downloaded only once.

Each array has one sparse file, named by its digest: chunk i begins at i times the chunk size. The
caller checks each chunk that it reads. TensorStore's cache pool is in memory and ends with the run.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

LARGEST = 50 << 30  # bytes of all arrays
_LOOK = 256  # chunks between checks of the free space
_SPARED = 0.1  # fraction of the disk to keep free


class ChunkCache:
    """The cached chunks of one array; shared by processes and thread-safe."""

    def __init__(self, folder: Path, name: str, chunk_bytes: int, largest: int = LARGEST):
        """Opens or creates the file `name` in `folder`, whose files have at most `largest` bytes.

        A full folder takes no more chunks, except in place of arrays unused for an hour: each epoch
        reads all tokens once, so it is best to keep the chunks that are there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._chunk_bytes, self._largest = folder / name, chunk_bytes, largest
        self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        os.utime(self._file)  # marks the array as in use
        self._kept, self._has_room = 0, self._make_room()

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, chunk: int, size: int) -> bytes:
        """Returns `size` bytes from the beginning of `chunk`, or fewer at the file's end."""
        return os.pread(self._descriptor, size, chunk * self._chunk_bytes)

    def keep(self, chunk: int, content: bytes) -> None:
        """Stores whole chunks from number `chunk` on, if there is room."""
        self._kept += 1
        if self._kept % _LOOK == 0:
            self._has_room = self._make_room()
        if self._has_room:
            try:
                os.pwrite(self._descriptor, content, chunk * self._chunk_bytes)
            except OSError:  # e.g. a full disk; these chunks are read again
                self._has_room = False

    def _make_room(self) -> bool:
        """Deletes unused arrays, the oldest first, until there is enough room."""
        found = []
        for file in self._file.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append((file.stat().st_mtime, file.stat().st_blocks * 512, file))
        disk = shutil.disk_usage(self._file.parent)
        used = sum(size for _, size, _ in found)
        excess = max(used - self._largest, int(_SPARED * disk.total) - disk.free)
        for used_at, size, file in sorted(found):
            if excess > 0 and used_at < time.time() - 3_600:
                file.unlink(missing_ok=True)
                excess -= size
        return excess < 0
