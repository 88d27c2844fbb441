"""Files on a disk or in a bucket, behind one interface for reading."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Store(Protocol):
    """The files below one place, by names such as `state/model.norm/0`.

    A file is whole or absent. A failure raises OSError, in a sentence that names the place.
    """

    def list(self, under: str = "") -> dict[str, int | None]:
        """The names of all files below the folder `under`, each relative to the store, and how many
        bytes they have; `None` where that takes another request."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, as far as it has them; raises FileNotFoundError if there
        is none."""

    def pieces(self, name: str, into: memoryview | None = None) -> Iterator[bytes | memoryview]:
        """The bytes of a file in turn; a piece is valid until the next. The buffer `into` gets as
        many as fit. Raises as `read`."""
