"""Files, compressed or not, as streams of bytes, for the readers of lines and of texts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMPRESSIONS = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
}  # by suffix, case-insensitive; the names are Arrow's
_SKIPPED_BYTES = 1024 * 1024  # read at once


def compression(path: Path) -> str:
    """Returns the name's last suffix in lower case if it is in `COMPRESSIONS`, otherwise ""."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def kind(path: Path) -> str:
    """Returns the format's suffix in lower case, ignoring one of a compression."""
    return (path.with_suffix("") if compression(path) else path).suffix.lower()


class Stream:
    """The decompressed content of a file."""

    def __init__(self, path: Path, stored: Any) -> None:
        self._path, self._stored, self._content = path, stored, stored
        if suffix := compression(path):
            import pyarrow as pa

            if not path.stat().st_size:
                raise OSError(f"{path} is empty, so not a whole {suffix}: make it again")
            self._content = pa.CompressedInputStream(stored, COMPRESSIONS[suffix])

    def read(self, count: int) -> bytes:
        """Returns the next bytes; empty at the end. Raises OSError, naming the file."""
        try:
            return self._content.read(count)
        except OSError as error:
            raise OSError(
                f"{self._path} cannot be read to its end ({error}): fetch or make it again"
            ) from error

    def seek(self, place: int) -> int:
        """Moves to a byte of the decompressed content; reads a compressed file up to there."""
        if self._content is self._stored:
            return self._stored.seek(place)
        done = 0
        while done < place and (content := self.read(min(place - done, _SKIPPED_BYTES))):
            done += len(content)
        return done

    @property
    def fraction(self) -> float:
        """Returns the fraction of the stored bytes that was read."""
        return self._stored.tell() / max(os.fstat(self._stored.fileno()).st_size, 1)


@contextmanager
def opened(path: Path) -> Iterator[Stream]:
    """Opens the content of the file; raises OSError on failure."""
    with open(path, "rb", buffering=0) as stored:
        yield Stream(path, stored)
