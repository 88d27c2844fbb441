"""What a process writes into its copy of a folder in a bucket, sent there as it is written."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmlib.storage.bucket.copies import REQUESTS
from lmlib.storage.bucket.parts import FOLDER, part_name
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.whole_file import UNFINISHED

SECONDS = 10.0  # between two looks at the copy
_LINES = ".jsonl"  # ending of files whose last line may still change
_GROWING = (_LINES, ".log")


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A file as the bucket has it.

    Attributes:
      seen: tells one state of the file from another.
      whole: of a file that grows, what the whole object holds.
      parts: how many followed.
      end: where the next part begins.
    """

    seen: tuple[int, int, int]
    whole: bytes = b""
    parts: int = 0
    end: int = 0


class Mirror:
    """Sends files of `copy` that are new, changed or deleted, in a thread of its own and by `sync`.

    What cannot be sent waits: the program goes on, and is told once.
    """

    def __init__(
        self,
        copy: Path,
        store: BucketStore,
        *,
        tell: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
        wanted: Callable[[str], bool] = lambda name: True,
    ):
        """Takes what is in `copy` for what the bucket has, and looks every `SECONDS`.

        Args:
          tell: is told that files wait, and why.
          check: called before anything is sent; what it raises prevents that.
          wanted: whether the file of that name is sent; others are of this machine alone, or
            another process's to send.
        """
        self._copy, self._store = copy, store
        self._tell, self._check, self._wanted = tell, check, wanted
        self._mutex, self._closed = threading.Lock(), threading.Event()
        # Whole objects of files that grow are made anew: which parts they have is not known here.
        found = {} if not copy.is_dir() else self._files()
        self._sent = {
            name: _Sent(seen) for name, seen in found.items() if not name.endswith(_GROWING)
        }
        self._stale = {name for name in found if name.endswith(_GROWING)}
        threading.Thread(target=self._keep, name="mirror", daemon=True).start()

    def sync(self) -> None:
        """Returns once the bucket has all that the copy holds; raises BucketError."""
        with self._mutex:
            self._check()
            found = self._files()
            changed = [name for name, seen in found.items() if not self._has(name, seen)]
            gone = [name for name in self._sent if name not in found]
            with ThreadPoolExecutor(REQUESTS) as threads:
                list(threads.map(self._send, changed, [found[name] for name in changed]))
                list(threads.map(self._delete, gone))

    def close(self) -> None:
        """As `sync`, for the last time; files that grew are whole objects then."""
        self._closed.set()
        with self._mutex:
            grown = [name for name, sent in self._sent.items() if sent.parts]
            for name in grown:
                del self._sent[name]
                self._stale.add(name)
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
            except Exception:  # the folder is another's now: whoever writes next says so
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

    def _has(self, name: str, seen: tuple[int, int, int]) -> bool:
        return name in self._sent and self._sent[name].seen == seen

    def _send(self, name: str, seen: tuple[int, int, int]) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._copy / name, "rb") as file:
            before = self._sent.get(name)
            if before is not None and before.whole and _grew(before, seen):
                file.seek(before.end)
                content = file.read()
                part = part_name(name, before.whole, before.parts, before.end)
                self._store.write(part, content)
                end = before.end + _settled(name, content)
                sent = dataclasses.replace(before, seen=seen, parts=before.parts + 1, end=end)
            else:
                content = file.read()
                self._store.write(name, content)
                if name in self._stale or (before is not None and before.parts):
                    self._delete_parts(name)
                    self._stale.discard(name)
                grows = name.endswith(_GROWING)
                sent = _Sent(seen, content if grows else b"", 0, _settled(name, content))
            self._sent[name] = sent

    def _delete(self, name: str) -> None:
        self._store.delete(name)
        self._delete_parts(name)
        del self._sent[name]

    def _delete_parts(self, name: str) -> None:
        if name.endswith(_GROWING):
            for part in self._store.list(f"{name}{FOLDER}"):
                self._store.delete(part)


def _grew(before: _Sent, seen: tuple[int, int, int]) -> bool:
    return before.seen[0] == seen[0] and before.seen[1] <= seen[1]


def _settled(name: str, content: bytes) -> int:
    """How many of the bytes will not change: all, or those before the last line."""
    if not name.endswith(_LINES):
        return len(content)
    return content.rstrip(b"\n").rfind(b"\n") + 1
