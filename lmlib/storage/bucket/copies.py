"""The copy on this machine of a folder in a bucket: its small files, which programs read and write.

Each URL has one place, `<cache>/buckets/read/gs/BUCKET/FOLDER`, and another for the process that
writes there, `buckets/written/…`. So a path says by itself where its files are at home, and what is
large stays there: arrays of checkpoints, and tokens, are read from the bucket. What is large and
made on this machine, to be sent when it is whole, has a third, `buckets/made/…`.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmlib.storage.bucket.parts import file_of, put_together
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.cache_folder import NO_HOME, cache_folder
from lmlib.storage.whole_file import write_whole

LEASE = "lease"  # folder of who writes there, by number
LOGS = "logs"  # folder of what the processes of a run print: each sends its own
FILES = ".files"  # ending of the folder that has the files of checkpoints
# Folders whose files stay in the bucket: what reads them goes there, or they are for people alone.
_LARGE = frozenset({"c", "tensorboard", "profile", "hlo", LEASE, LOGS})
REQUESTS = 16  # at once
_READ, _WRITTEN, _MADE, _LOCKS = "read", "written", "made", "locks"


def copies_folder() -> Path:
    """Where all copies lie; raises ValueError where there is no such place."""
    cache = cache_folder()
    if cache is None:
        raise ValueError(f"folders in buckets have a copy here, and {NO_HOME}: set XDG_CACHE_HOME")
    return Path(os.path.realpath(cache / "buckets"))


def url_of(path: Path) -> BucketUrl | None:
    """What `path` is a copy of; `None` for any other folder."""
    return _url_of(path, _READ, _WRITTEN)


def place_of(url: BucketUrl) -> Path:
    """The path that stands for `url`, where nothing need be."""
    return _copy(_READ, url)


def place_to_make(url: BucketUrl) -> Path:
    """The path at which what `url` will have is made; what a kill left there stays."""
    return _copy(_MADE, url)


def shown(path: Path) -> str:
    """The name that the user gave: a URL if `path` is a bucket's copy, or made for one."""
    return str(_url_of(path, _READ, _WRITTEN, _MADE) or path)


def copy_to_read(url: BucketUrl) -> Path:
    """A copy of `url`, as the bucket has it now; others of this machine read the same.

    Raises:
      BucketError: if the bucket cannot be read.
    """
    copy = _copy(_READ, url)
    names = fetch(url, copy)
    for file in [each for each in copy.rglob("*") if each.is_file()]:
        name = file.relative_to(copy).as_posix()
        if name not in names and not _stays(name):  # what was not fetched is this machine's own
            file.unlink(missing_ok=True)
    return copy


def fetch(url: BucketUrl, copy: Path) -> set[str]:
    """Brings the small files of `url`, as the bucket has them now; returns their names.

    Raises:
      BucketError: if the bucket cannot be read.
    """
    store = BucketStore(url)
    names = {name for name in store.list() if not _stays(name)}

    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(file_of(name), []).append(name)

    def bring(name: str) -> None:
        file = copy / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it was deleted since
            write_whole(file, put_together(store, name, parts[name]))

    with ThreadPoolExecutor(REQUESTS) as threads:
        list(threads.map(bring, parts))
    return set(parts)


@contextlib.contextmanager
def place_to_write(url: BucketUrl) -> Iterator[Path]:
    """An empty folder that stands for `url`, this process's alone on this machine while the block
    runs; `fetch` brings what the bucket has.

    Raises:
      BlockingIOError: if another process of this machine writes there.
    """
    copy = _copy(_WRITTEN, url)
    digest = hashlib.sha256(str(url).encode()).hexdigest()[:32]
    lock = copies_folder() / _LOCKS / digest
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which the end of the process gives back
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True, exist_ok=True)
        yield copy


def _copy(kind: str, url: BucketUrl) -> Path:
    return copies_folder() / kind / url.scheme / url.bucket / url.folder


def _url_of(path: Path, *kinds: str) -> BucketUrl | None:
    if cache_folder() is None:
        return None
    try:
        kind, scheme, bucket, *parts = path.absolute().relative_to(copies_folder()).parts
    except ValueError:
        return None
    return BucketUrl(scheme, bucket, "/".join(parts)) if kind in kinds else None


def _stays(name: str) -> bool:
    folders = name.split("/")[:-1]
    return any(folder in _LARGE or folder.endswith(FILES) for folder in folders)
