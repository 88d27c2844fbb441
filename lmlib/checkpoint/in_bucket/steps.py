"""The steps in a directory of a bucket: found, read, removed and set aside."""

import dataclasses
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmlib.storage.bucket.copies import ARRAYS, REQUESTS, url_of
from lmlib.storage.bucket.store import BucketStore

POINTER = "arrays"
MANIFEST = "manifest.json"
_STATE = "state/"  # how the names of files in the folder of arrays begin


def steps_at(directory: Path) -> "StepsInBucket | None":
    """The steps that `directory`, a copy of a folder in a bucket, stands for; else `None`."""
    url = url_of(directory)
    if url is None:
        return None
    apart = dataclasses.replace(url, folder=f"{url.folder}{ARRAYS}")
    return StepsInBucket(BucketStore(url), BucketStore(apart))


@dataclasses.dataclass(frozen=True)
class StepsInBucket:
    """Steps by the names of their folders.

    Attributes:
      small: has the folders of the steps.
      arrays: has those of their arrays.
    """

    small: BucketStore
    arrays: BucketStore

    def names(self) -> dict[str, bool]:
        """Every folder of a step, and whether it is whole."""
        files = self.small.list()
        folders = {name.partition("/")[0] for name in files if "/" in name}
        return {folder: f"{folder}/{MANIFEST}" in files for folder in sorted(folders)}

    def is_whole(self, name: str) -> bool:
        return f"{name}/{MANIFEST}" in self.small.list(name)

    def files(self, name: str) -> "FilesOfStep":
        return FilesOfStep(self, name)

    def remove(self, name: str) -> None:
        """Removes a step; a kill leaves one that is not whole."""
        self.small.delete(f"{name}/{MANIFEST}")
        files = self.files(name)
        if files.folder is not None:
            self._delete_arrays(files.folder)
        self._delete_small(name)

    def set_aside(self, name: str, aside: str) -> None:
        """Puts what leads to the arrays of `name` in a folder `aside`; what was there goes."""
        own, other = self.files(name).folder, self.files(aside).folder
        if other is not None and own is not None and other != own:
            self.remove(aside)
        files = sorted(self.small.list(name), key=lambda file: not file.endswith(f"/{POINTER}"))
        for file in files:
            self.small.write(file.replace(name, aside, 1), self.small.read(file))
        for file in files:  # what leads to the arrays goes first: then they are the other's alone
            self.small.delete(file)

    def _delete_arrays(self, folder: str) -> None:
        with ThreadPoolExecutor(REQUESTS) as threads:
            list(threads.map(self.arrays.delete, self.arrays.list(folder)))

    def _delete_small(self, name: str) -> None:
        """What leads to the arrays goes last."""
        for file in sorted(self.small.list(name), key=lambda file: file.endswith(f"/{POINTER}")):
            self.small.delete(file)


class FilesOfStep:
    """The files of one step by the names that they have on a disk, as a `Store`."""

    def __init__(self, steps: StepsInBucket, name: str):
        self._steps, self._name = steps, name

    @functools.cached_property
    def folder(self) -> str | None:
        """The folder of the arrays; `None` if nothing says which it is."""
        try:
            return self._steps.small.read(f"{self._name}/{POINTER}").decode()
        except FileNotFoundError:
            return None

    def list(self, under: str = "") -> dict[str, int | None]:
        """See `Store`."""
        small = self._steps.small.list(self._name)
        names = {name.removeprefix(f"{self._name}/") for name in small} - {POINTER}
        if self.folder is not None:
            found = self._steps.arrays.list(self.folder)
            names |= {name.removeprefix(f"{self.folder}/") for name in found}
        return {name: None for name in names if not under or name.startswith(f"{under}/")}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store`."""
        store, name = self._placed(name)
        return store.read(name, start, stop)

    def pieces(self, name: str, into: memoryview | None = None) -> Iterator[bytes | memoryview]:
        """See `Store`."""
        store, name = self._placed(name)
        return store.pieces(name, into)

    def write(self, name: str, content: bytes) -> None:
        """See `Store`."""
        store, name = self._placed(name)
        store.write(name, content)

    def write_if_absent(self, name: str, content: bytes) -> bool:
        """See `Store`."""
        store, name = self._placed(name)
        return store.write_if_absent(name, content)

    def delete(self, name: str) -> None:
        """See `Store`."""
        store, name = self._placed(name)
        store.delete(name)

    def _placed(self, name: str) -> tuple[BucketStore, str]:
        if name.startswith(_STATE):
            return self._steps.arrays, f"{self.folder}/{name}"
        return self._steps.small, f"{self._name}/{name}"
