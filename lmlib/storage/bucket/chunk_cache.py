"""Local cache of array chunks in buckets, so that each is downloaded only once.

Each array has one sparse file, named by its digest: chunk i begins at i times the chunk size. A
chunk is valid if its digest matches; other chunks are read from the bucket.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

LARGEST = 50 << 30  # bytes of all arrays
_LOOK = 256  # chunks between checks of the free space
_SPARED = 0.1  # fraction of the disk to keep free


class ChunkCache:
    """The cached chunks of one array; shared by processes and thread-safe."""

    def __init__(
        self,
        folder: Path,
        name: str,
        are_sound: Callable[[int, np.ndarray], bool],
        chunk_length: int,
        largest: int = LARGEST,
    ):
        """Opens or creates the file `name` in `folder`.

        Args:
          are_sound: True if the elements match the chunks from a given number on.
          chunk_length: elements of a chunk; the last may have fewer.
          largest: bytes of all files of the folder. A full folder accepts no more chunks, except in
            place of old arrays: each epoch reads all tokens once, so keeping the present chunks is
            best.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / name
        self._are_sound, self._chunk_length, self._largest = are_sound, chunk_length, largest
        self._opened = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
        os.utime(self._file)  # marks the array as in use
        self._kept, self._has_room = 0, self._make_room()

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            os.close(self._opened)

    def read(self, first: int, lengths: Sequence[int], dtype: np.dtype) -> np.ndarray | None:
        """Returns the chunks from number `first` on, with `lengths` elements each.

        `None` unless all are cached.
        """
        content = os.pread(
            self._opened,
            sum(lengths) * dtype.itemsize,
            first * self._chunk_length * dtype.itemsize,
        )
        if len(content) < sum(lengths) * dtype.itemsize:
            return None
        values = np.frombuffer(content, dtype)
        return values if self._are_sound(first, values) else None

    def keep(self, first: int, values: np.ndarray) -> None:
        """Stores whole chunks from number `first` on, if there is room."""
        self._kept += 1
        if self._kept % _LOOK == 0:
            self._has_room = self._make_room()
        if not self._has_room:
            return
        content = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
        place = first * self._chunk_length * values.dtype.itemsize
        try:
            os.pwrite(self._opened, content.tobytes(), place)
        except OSError:  # e.g. a full disk; these chunks are read again
            self._has_room = False

    def _make_room(self) -> bool:
        """Deletes unused arrays, the oldest first, until there is enough room."""
        facts = {}
        for file in self._file.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):
                facts[file] = file.stat()
        used = {file: each.st_blocks * 512 for file, each in facts.items()}
        system = os.statvfs(self._file.parent)
        missing = int(_SPARED * system.f_blocks - system.f_bavail) * system.f_frsize
        excess = max(sum(used.values()) - self._largest, missing)
        newest = facts[self._file].st_mtime - 3_600
        for file in sorted(facts, key=lambda file: facts[file].st_mtime):
            if excess <= 0:
                break
            if facts[file].st_mtime < newest:
                file.unlink(missing_ok=True)
                excess -= used[file]
        return excess < 0
