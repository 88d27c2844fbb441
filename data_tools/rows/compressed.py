"""Compressed files as streams of bytes, in which a missing end is an error."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

COMPRESSIONS = (".gz", ".zst")  # suffixes, in any case
_READ_BYTES = 1024  # decompressed at once: what zstd makes of them is up to 32,768 times as long
_BUFFER_BYTES = 1024 * 1024


def compression(path: Path) -> str:
    """The last suffix of the name if it is one of `COMPRESSIONS`, in lower case; else ""."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def decompressed(stored: BinaryIO, path: Path) -> BinaryIO:
    """What `stored`, the file at `path`, holds, decompressed if its name ends in .gz or .zst.

    Reading raises OSError, naming the file, if it is not whole or not what its name says.
    """
    suffix = compression(path)
    if suffix == ".gz":
        raw = _Decompressed(stored, path, _gzip_decompressor, zlib.error)
    elif suffix == ".zst":
        import zstandard

        def decompressor() -> Any:
            return zstandard.ZstdDecompressor().decompressobj()

        raw = _Decompressed(stored, path, decompressor, zstandard.ZstdError)
    else:
        return stored
    return io.BufferedReader(raw, _BUFFER_BYTES)


def skip(stream: BinaryIO, count: int) -> None:
    """Reads `count` bytes, or up to the end, and drops them."""
    while count > 0 and (content := stream.read(min(count, _BUFFER_BYTES))):
        count -= len(content)


def _gzip_decompressor() -> Any:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


class _Decompressed(io.RawIOBase):
    """One or more compressed members, one after the other."""

    def __init__(
        self, stored: BinaryIO, path: Path, new: Callable[[], Any], error: type[Exception]
    ) -> None:
        self._stored, self._path, self._new, self._error = stored, path, new, error
        self._decompressor = new()
        self._whole = False  # a member has ended, and nothing of another was read yet
        self._compressed = b""
        self._decompressed = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            if self._decompressor.eof:
                self._compressed = self._decompressor.unused_data
                self._decompressor, self._whole = self._new(), True
            self._compressed = self._compressed or self._stored.read(_READ_BYTES)
            if not self._compressed:
                if not self._whole:
                    raise OSError(f"{self._path} ends too early: the file is not whole")
                return 0
            try:
                self._decompressed = memoryview(self._decompressor.decompress(self._compressed))
            except self._error as error:
                raise OSError(f"{self._path} cannot be decompressed: {error}") from error
            self._compressed, self._whole = b"", False
        length = min(len(buffer), len(self._decompressed))
        buffer[:length] = self._decompressed[:length]
        self._decompressed = self._decompressed[length:]
        return length
