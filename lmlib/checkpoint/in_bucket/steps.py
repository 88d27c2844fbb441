"""The steps in a directory of a bucket: listed, read, added, removed and set aside."""

import dataclasses
import errno
import math
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lmlib.storage.bucket.copies import FILES, url_of
from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.bucket.owned import OwnedObject
from lmlib.storage.bucket.store import REQUESTS, BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.stored_json import parse_json

INDEX = "steps.json"
MANIFEST = "manifest.json"
_NAME = re.compile(r"[0-9]{1,18}(\.damaged)?")
_FOLDER = re.compile(r"[0-9]+-[0-9a-f]+-[0-9]+")


def steps_at(directory: Path, check: Callable[[], None] = lambda: None) -> "StepsInBucket | None":
    """Returns the steps of a bucket directory from its local copy; `None` for other folders.

    `check` is called before each write and deletion, which it prevents by raising.
    """
    url = url_of(directory)
    return None if url is None else StepsInBucket(url, check)


class Kept(NamedTuple):
    """A stored step: the folder of its files, and its rank, lower is better."""

    folder: str
    metric: float | None = None


class StepsInBucket:
    """Steps by name. Any process may read them.

    Only the process that called `take` last may change them.
    """

    def __init__(self, url: BucketUrl, check: Callable[[], None]):
        self._check = check
        self._folders = dataclasses.replace(url, folder=f"{url.folder}{FILES}")
        self._all_files = BucketStore(self._folders, permit=check)
        self._index = OwnedObject(BucketStore(url, permit=check), INDEX)
        self._kept: dict[str, Kept] = {}  # as last written by this process

    def kept(self) -> dict[str, Kept]:
        """Returns the current steps; raises BucketError if steps.json is damaged."""
        return self._parsed(self._index.found().content)

    def files(self, name: str) -> BucketStore:
        """Returns the files of a step; raises FileNotFoundError if it does not exist."""
        kept = self.kept().get(name)
        if kept is None:
            place = f"{self._index.store.url}/{name}"
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        return self.files_in(kept.folder)

    def files_in(self, folder: str) -> BucketStore:
        """Returns the files in a step's folder, which may be new."""
        url = self._folders.below(folder)
        return BucketStore(url, permit=self._check)

    def take(self) -> None:
        """Makes this process the writer; removes unfinished folders of others.

        Raises:
          BucketError: if there are files of checkpoints that steps.json does not list.
        """
        taken = False
        while not taken:
            folders, found = self._list_folders(), self._index.found()
            self._kept = self._parsed(found.content)
            if found.content is None and any(MANIFEST in files for files in folders.values()):
                raise BucketError(
                    errno.EIO,
                    f"cannot read {self._index.store.url}/{INDEX}: it is gone, and only it leads "
                    f"to the checkpoints in {self._folders}: put it back, or delete them",
                )
            taken = self._index.take(_encoded(self._kept), found)
        # No other process can add them now, since the object has changed.
        self._delete(folders)

    def remove_unfinished(self) -> None:
        """Removes the folder of a failed save of this process."""
        folders = self._list_folders()
        self._write(self._kept)
        self._delete(folders)

    def add(self, name: str, folder: str) -> None:
        """Makes the step whose files are in `folder` visible."""
        self._write({**self._kept, name: Kept(folder)})

    def remove(self, names: Iterable[str]) -> None:
        """Removes steps; a kill leaves files that belong to no step."""
        kept = dict(self._kept)
        if removed := [kept.pop(name).folder for name in names]:
            self._write(kept)
            self._delete(removed)

    def set_aside(self, name: str, aside: str) -> None:
        """Renames a step; an earlier step with the new name is deleted."""
        kept = dict(self._kept)
        replaced = kept.pop(aside, None)
        kept[aside] = kept.pop(name)
        self._write(kept)
        if replaced is not None:
            self._delete([replaced.folder])

    def rank(self, name: str, metric: float) -> None:
        self._write({**self._kept, name: self._kept[name]._replace(metric=float(metric))})

    def _write(self, kept: dict[str, Kept]) -> None:
        self._index.write(_encoded(kept))
        self._kept = kept

    def _list_folders(self) -> dict[str, set[str]]:
        """Returns the names of the files in each step's folder, complete or not."""
        folders: dict[str, set[str]] = {}
        for name in self._all_files.list():
            folder, _, file = name.partition("/")
            folders.setdefault(folder, set()).add(file)
        return folders

    def _delete(self, folders: Iterable[str]) -> None:
        """Deletes the files in all `folders` that belong to no step."""
        kept = {step.folder for step in self._kept.values()}
        with ThreadPoolExecutor(REQUESTS) as threads:
            for folder in set(folders) - kept:
                list(threads.map(self._all_files.delete, self._all_files.list(folder)))

    def _parsed(self, content: bytes | None) -> dict[str, Kept]:
        if content is None:
            return {}
        try:
            steps = parse_json(content)["steps"]
            return {name: _step(name, **facts) for name, facts in steps.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            place = f"{self._index.store.url}/{INDEX}"
            raise BucketError(errno.EIO, f"cannot read {place}: it is damaged") from error


def _step(name: str, folder: Any, metric: Any) -> Kept:
    """Parses an entry; raises ValueError or TypeError if no process has written it."""
    if not (_NAME.fullmatch(name) and _FOLDER.fullmatch(folder)):
        raise ValueError(f"step {name!r:.80} in {folder!r:.80}")
    if metric is not None and not (isinstance(metric, float) and math.isfinite(metric)):
        raise ValueError(f"metric {metric!r:.80}")
    return Kept(folder, metric)


def _encoded(kept: dict[str, Kept]) -> dict[str, Any]:
    return {"steps": {name: step._asdict() for name, step in kept.items()}}
