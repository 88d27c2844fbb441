"""Compressed files as streams of bytes, in which a missing end is an error."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

COMPRESSIONS = (".gz", ".zst")
_READ_BYTES = 1024 * 1024


def open_bytes(path: Path) -> BinaryIO:
    """The file's content, decompressed if its name ends in .gz or .zst.

    Reading raises OSError, naming the file, if it is not whole or not what its name says.
    """
    if path.suffix == ".gz":
        return io.BufferedReader(_Decompressed(path, _gzip_decompressor, zlib.error), _READ_BYTES)
    if path.suffix == ".zst":
        import zstandard

        def decompressor() -> Any:
            return zstandard.ZstdDecompressor().decompressobj()

        raw = _Decompressed(path, decompressor, zstandard.ZstdError)
        return io.BufferedReader(raw, _READ_BYTES)
    return open(path, "rb", buffering=0)


def _gzip_decompressor() -> Any:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


class _Decompressed(io.RawIOBase):
    """One or more compressed members, one after the other."""

    def __init__(self, path: Path, new: Callable[[], Any], error: type[Exception]) -> None:
        self._path, self._new, self._error = path, new, error
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close)
        self._decompressor = new()
        self._fresh = True  # nothing of the member at hand was read yet
        self._compressed = b""
        self._decompressed = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._decompressed:
            if self._decompressor.eof:
                self._compressed = self._decompressor.unused_data
                self._decompressor, self._fresh = self._new(), True
            self._compressed = self._compressed or self._file.read(_READ_BYTES)
            if not self._compressed:
                if not self._fresh:
                    raise OSError(f"{self._path} ends too early: the file is not whole")
                return 0
            try:
                self._decompressed = memoryview(self._decompressor.decompress(self._compressed))
            except self._error as error:
                raise OSError(f"{self._path} cannot be decompressed: {error}") from error
            self._compressed, self._fresh = b"", False
        length = min(len(buffer), len(self._decompressed))
        buffer[:length] = self._decompressed[:length]
        self._decompressed = self._decompressed[length:]
        return length

    def close(self) -> None:
        self._file.close()
        super().close()
