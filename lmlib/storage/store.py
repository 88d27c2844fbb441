"""Files on a disk or in a bucket, behind one interface for reading."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable


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
