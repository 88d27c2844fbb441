"""Files, compressed or not, as streams of bytes, for the readers of lines and of texts."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # by suffix, case-insensitive; the names are Arrow's
_SKIPPED_BYTES = 1024 * 1024  # read at once


def compression(path: Path) -> str:
    """Returns the name's last suffix in lower case if it is in `COMPRESSIONS`, otherwise ""."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


class Stream:
    """The decompressed content of a file."""

    def __init__(self, path: Path, stored: Any, content: Any) -> None:
        self._path, self._stored, self._content = path, stored, content

    def read(self, count: int) -> bytes:
        """Returns the next bytes; empty at the end.

        Raises OSError, naming the file, if it is truncated or not in the format of its suffix.
        """
        try:
            return self._content.read(count)
        except OSError as error:
            raise OSError(
                f"{self._path} cannot be read to its end ({error}): fetch or make it again"
            ) from error

    def seek(self, place: int) -> int:
        """Seeks to a byte of the decompressed content.

        A compressed file is read from its beginning.
        """
        if self._content is self._stored:
            return self._stored.seek(place)
        done = 0
        while done < place and (content := self.read(min(place - done, _SKIPPED_BYTES))):
            done += len(content)
        return done

    @property
    def fraction(self) -> float:
        """Returns the fraction of the stored bytes that was read."""
        place = self._stored.tell()
        size = self._stored.seek(0, io.SEEK_END)
        self._stored.seek(place)
        return place / max(size, 1)


@contextmanager
def opened(path: Path) -> Iterator[Stream]:
    """Opens the content of the file.

    Raises OSError on failure, or if the file is compressed but empty.
    """
    with open(path, "rb", buffering=0) as stored:
        if not compression(path):
            yield Stream(path, stored, stored)
            return
        import pyarrow as pa

        if not path.stat().st_size:
            raise OSError(f"{path} is empty, so not a whole {compression(path)}: make it again")
        yield Stream(
            path, stored, pa.CompressedInputStream(stored, COMPRESSIONS[path.suffix.lower()])
        )
