"""Where files lie, on a disk or in a bucket, as what needs them asks for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from lmlib.storage.bucket.copies import url_of
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.folder_store import FolderStore


@runtime_checkable
class Store(Protocol):
    """The files below one place, by names such as `state/model.norm/0`.

    A file is whole or absent, and what one process has written the next one reads. No order of
    writes or of names is promised to another process: what says that others are there comes last.
    Whatever fails raises OSError, in a sentence that names the place.
    """

    def list(self, under: str = "") -> dict[str, int | None]:
        """The names of all files below the folder `under`, each relative to the store, and how many
        bytes they have; `None` where that takes another request."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, as far as it has them; raises FileNotFoundError if there
        is none."""

    def pieces(self, name: str, into: memoryview | None = None) -> Iterator[bytes | memoryview]:
        """The bytes of a file in turn, as many as fit being left in the buffer `into`; a piece is
        valid until the next. Raises as `read`."""

    def write(self, name: str, content: bytes) -> None:
        """Puts `content` in the place of a file, whole, and durably when it returns."""

    def write_if_absent(self, name: str, content: bytes) -> bool:
        """As `write`, of a file that is not there; whether it was not. Of several processes one
        writes it. `content` must not be what another would write."""

    def delete(self, name: str) -> None:
        """Deletes a file, which may be absent."""


def store_of(folder: Path) -> Store:
    """The store of a folder's files: a bucket if `folder` is a bucket's copy, else the disk."""
    url = url_of(folder)
    return FolderStore(folder) if url is None else BucketStore(url)
