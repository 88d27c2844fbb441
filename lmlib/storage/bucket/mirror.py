"""Uploads the files that a process writes into its copy of a folder in a bucket."""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lmlib.storage.atomic_file import UNFINISHED
from lmlib.storage.bucket.copies import PARTS
from lmlib.storage.bucket.store import REQUESTS, BucketStore

SECONDS = 10.0  # between checks of the copy
_LINES = ".jsonl"  # suffix of files whose last line may still change
_GROWING = (_LINES, ".log")


class _Sent(NamedTuple):
    """A file as it was sent: a text that identifies its state, and a growing file's next offset."""

    seen: tuple[int, int, int]
    end: int = 0


class Mirror:
    """Sends new, changed and deleted files of `copy`, in a thread of its own and by `sync`.

    No other process may write the same objects. Files that cannot be sent are retried: the program
    continues, and the user gets one warning.
    """

    def __init__(
        self,
        copy: Path,
        store: BucketStore,
        *,
        tell: Callable[[str], None],
        object_of: Callable[[str], str] = lambda name: name,
        wanted: Callable[[str], bool] = lambda name: True,
    ):
        """Checks `copy` every `SECONDS`.

        Args:
          tell: receives the warning that files are delayed, with the reason.
          object_of: maps a file of `copy` to its name in `store`.
          wanted: True for a file, by name, that is sent. Another process sends the rest.
        """
        self._copy, self._store, self._tell = copy, store, tell
        self._object_of, self._wanted = object_of, wanted
        self._mutex, self._closed = threading.Lock(), threading.Event()
        self._sent: dict[str, _Sent] = {}
        self._numbers = itertools.count()  # numbers of parts
        threading.Thread(target=self._keep, name="mirror", daemon=True).start()

    def sync(self) -> None:
        """Returns once the bucket has everything in the copy; raises BucketError."""
        with self._mutex:
            found = self._files()
            sent = {name: each.seen for name, each in self._sent.items()}
            changed = [name for name, seen in found.items() if sent.get(name) != seen]
            gone = sent.keys() - found.keys()
            with ThreadPoolExecutor(REQUESTS) as threads:
                list(threads.map(self._send, changed, [found[name] for name in changed]))
                list(threads.map(self._delete, gone))

    def close(self) -> None:
        """Calls `sync` for the last time; growing files become one object each."""
        with self._mutex:
            self._closed.set()
            for name in filter(lambda name: name.endswith(_GROWING), self._sent):
                self._sent[name] = _Sent((0, 0, 0))
        self.sync()

    def _keep(self) -> None:
        told = False
        while not self._closed.wait(SECONDS):
            try:
                self.sync()
                told = False
            except OSError as error:
                if not told:
                    self._tell(f"WARNING: {error.strerror or error}; it is tried again")
                told = True
            except Exception:  # the folder now belongs to another run; the next write raises
                return

    def _files(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for folder, _, files in os.walk(self._copy):
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self._copy).as_posix()
                if file.endswith(UNFINISHED) or not self._wanted(name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    facts = path.stat()
                    found[name] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        return found

    def _send(self, name: str, seen: tuple[int, int, int]) -> None:
        key, before = self._object_of(name), self._sent.get(name)
        with contextlib.suppress(FileNotFoundError), open(self._copy / name, "rb") as file:
            growing = name.endswith(_GROWING)
            if not growing or self._closed.is_set():
                self._store.write(key, file.read())
                if growing:
                    self._delete_parts(key)
                self._sent[name] = _Sent(seen)
            else:
                grew = before and before.seen[0] == seen[0] and before.seen[1] <= seen[1]
                start = before.end if before and grew else 0
                file.seek(start)
                content = file.read()
                self._store.write(f"{key}{PARTS}/{next(self._numbers):08}-{start}", content)
                self._sent[name] = _Sent(seen, start + _settled(name, content))

    def _delete(self, name: str) -> None:
        key = self._object_of(name)
        self._store.delete(key)
        if name.endswith(_GROWING):
            self._delete_parts(key)
        del self._sent[name]

    def _delete_parts(self, key: str) -> None:
        for part in self._store.list(f"{key}{PARTS}"):
            self._store.delete(part)


def _settled(name: str, content: bytes) -> int:
    """Returns the number of bytes that will not change: all, or those before the last line."""
    if not name.endswith(_LINES):
        return len(content)
    return content.rstrip(b"\n").rfind(b"\n") + 1
