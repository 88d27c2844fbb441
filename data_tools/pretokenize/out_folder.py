"""The output folder of a command that makes shards: on a disk, or the local part of a bucket's."""

import dataclasses
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data_tools.command_line import ProgressLine
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import FILE_NAME
from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.bucket.copies import place_to_make
from lmlib.storage.bucket.store import REQUESTS, BucketStore, upload
from lmlib.storage.bucket.url import BucketUrl


class OutFolder:
    """The folder of a data set.

    `path` is on this machine. For a folder in a bucket it has the metadata of the bucket's shards,
    and unfinished shards, which any later process continues.
    """

    @classmethod
    def of(cls, out: "str | os.PathLike[str] | OutFolder") -> "OutFolder":
        """Returns `out` itself if it is an `OutFolder`."""
        return out if isinstance(out, OutFolder) else cls(out)

    def __init__(self, out: str | os.PathLike[str]):
        """Raises ValueError for an invalid name, BucketError if the bucket cannot be read."""
        self._name = os.fspath(out)
        self._url = BucketUrl.parsed(self._name)
        if self._url is None:
            self.path = data_path(out)
        else:
            self.path = data_path(place_to_make(self._url))
            self._fetch(BucketStore(self._url))

    @property
    def is_in_bucket(self) -> bool:
        return self._url is not None

    def __str__(self) -> str:
        """The name that the user gave."""
        return self._name.rstrip("/") or self._name

    def send(self, split: str, shard: str) -> None:
        """Uploads a complete shard, its metadata last; only the metadata stays here.

        Files that the bucket already has are not sent again. Raises FileExistsError if the bucket
        has another tokenizer or chat template, BucketError if it cannot be written.
        """
        if self._url is None:
            return
        store, name = BucketStore(self._url), f"{split}/{shard}"
        folder = self.path / name
        if f"{name}/{FILE_NAME}" not in store.list(name):
            for file in self._shared():
                if not store.write_if_absent(file.name, file.read_bytes()):
                    raise FileExistsError(
                        f"{self._url}/{file.name} differs from the one in {self.path}: choose "
                        "another folder, or the same tokenizer and template"
                    )
            below = f"{self._url.folder}/{name}".lstrip("/")
            of_shard = BucketStore(dataclasses.replace(self._url, folder=below))
            line, unit = ProgressLine(), f"bytes of {shard} sent"
            upload(folder, of_shard, [FILE_NAME], lambda n, all: line({unit: n}, n / max(all, 1)))
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != FILE_NAME:
                entry.unlink()

    def _shared(self) -> list[Path]:
        """Returns the files shared by all shards, next to the splits."""
        return [file for file in self.path.glob("[!.]*") if file.is_file()]

    def _fetch(self, store: BucketStore) -> None:
        names = {name for name in store.list() if "/" not in name or name.endswith(f"/{FILE_NAME}")}
        for file in self.path.glob(f"*/*/{FILE_NAME}"):
            was_sent = len(list(file.parent.iterdir())) == 1
            if was_sent and file.relative_to(self.path).as_posix() not in names:
                shutil.rmtree(file.parent)  # the shard was deleted in the bucket
        if not any(self.path.glob("*/*")):
            for file in self._shared():
                file.unlink()

        def fetch(name: str) -> None:
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, store.read(name))

        with ThreadPoolExecutor(REQUESTS) as threads:
            list(threads.map(fetch, names))
