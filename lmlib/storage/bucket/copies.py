"""Local copy of a folder in a bucket: its small files, which programs read and write.

Each URL has one place for reading, `<cache>/buckets/read/gs/BUCKET/FOLDER`, and another for the
process that writes to it, `buckets/written/…`. A path therefore identifies its bucket. Large files
stay remote: checkpoint arrays and tokens are read from the bucket. Large files that are made on
this machine, to be sent when they are complete, have a third place, `buckets/made/…`.

In a run's folder each start writes its small files under its own name, `files/<start>/…`, after it
has copied those of the previous start. The entry `files` of `lease/owner.json` names the start
whose files are valid. A late request of an earlier start therefore changes no valid file.

Objects in a bucket cannot be appended to. While a process runs, a growing file is a sequence of
objects, `metrics.jsonl.parts/<number>-<offset>`: each replaces everything after its offset. At the
end it becomes one object, `metrics.jsonl`, which takes precedence over any parts.
"""

import contextlib
import errno
import fcntl
import hashlib
import re
import shutil
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.bucket.store import REQUESTS, BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import MADE, READ, WRITTEN, copies_folder, in_bucket, shown
from lmlib.storage.stored_json import parse_json

LEASE = "lease/owner.json"  # the writing process, and the start whose files are valid
START_FILES = "files"  # folder of the small files of a run
LOGS = "logs"  # folder for the output of a run's processes; each sends its own
_INDEXES = "checkpoints"  # folder of a run for its list of checkpoints
FILES = ".files"  # suffix of the folder with the files of checkpoints
# Folders whose files stay in the bucket: they are read remotely, or only by people.
_LARGE = frozenset({"c", "tensorboard", "profile", "hlo", "lease", LOGS})
PARTS = ".parts"
_PART = re.compile(rf"(.*){re.escape(PARTS)}/(\d+)-(\d+)")
_LOCKS = "locks"  # folder next to the copies


def url_of(path: Path) -> BucketUrl | None:
    """Returns the URL that `path` is a copy of; `None` for any other folder."""
    return BucketUrl.parsed(shown(path)) if in_bucket(path) else None


def place_of(url: BucketUrl) -> Path:
    """Returns the path that stands for `url`; it may be absent."""
    return _copy(READ, url)


def place_to_make(url: BucketUrl) -> Path:
    """Returns the path at which files for `url` are made; files left by a kill stay there."""
    return _copy(MADE, url)


def copy_to_read(url: BucketUrl) -> Path:
    """Returns an up-to-date copy of `url`, shared by the processes of this machine.

    Raises:
      BucketError: if the bucket cannot be read.
    """
    copy, names = _copy(READ, url), None
    while names is None:
        names = fetch(url, copy, start_of(url))
    for file in [each for each in copy.rglob("*") if each.is_file()]:
        name = file.relative_to(copy).as_posix()
        if name not in names and not _stays(name):  # files that are never fetched are local
            file.unlink(missing_ok=True)
    return copy


def start_of(url: BucketUrl) -> str | None:
    """Returns the start whose files are valid for the run in `url`; `None` if there is no run.

    Raises BucketError if the bucket cannot be read, or the run's lease is damaged.
    """
    content = BucketStore(url).found(LEASE).content
    if content is None:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if re.fullmatch("[0-9a-f]+", start := parse_json(content)["files"]):
            return start
    raise BucketError(errno.EIO, f"cannot read {url}/{LEASE}: it is damaged")


def object_of(name: str, start: str) -> str:
    """Returns the object of a run's file, as written by its start `start`."""
    top, _, rest = name.partition("/")
    match top:
        case "tensorboard":  # their names contain the time and the host
            return name
        case "profile" | "hlo":
            return f"{top}/{start}/{rest}"
    return f"{START_FILES}/{start}/{name}"


def fetch(url: BucketUrl, copy: Path, start: str | None) -> set[str] | None:
    """Downloads the small files of `url` and returns their names.

    `None` if the bucket has changed meanwhile. For a run, only the files of `start` are fetched.

    Raises:
      BucketError: if the bucket cannot be read.
    """
    store, own = BucketStore(url), f"{START_FILES}/{start}/"
    if start is None:
        names = [name for name in store.list() if not _stays(name)]
    else:
        names = [*store.list(own.rstrip("/")), *store.list(_INDEXES)]
    objects: dict[str, list[str]] = {}
    for name in names:
        objects.setdefault(file_of(name).removeprefix(own), []).append(name)

    def bring(name: str) -> None:
        file = copy / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, put_together(store, objects[name]))

    with ThreadPoolExecutor(REQUESTS) as threads:
        try:
            list(threads.map(bring, objects))
        except FileNotFoundError:  # deleted meanwhile
            return None
    return set(objects) if start is None or start_of(url) == start else None


def file_of(object_name: str) -> str:
    """Returns the file that an object holds, or holds a part of."""
    part = _PART.fullmatch(object_name)
    return part[1] if part else object_name


def put_together(store: BucketStore, objects: Collection[str]) -> bytes:
    """Returns the content of the file that `objects` hold, whole or in parts.

    Raises FileNotFoundError if one is gone.
    """
    found = [part for part in map(_PART.fullmatch, objects) if part]
    if len(found) < len(objects):
        (whole,) = (name for name in objects if file_of(name) == name)
        return store.read(whole)
    parts = sorted((int(part[2]), int(part[3]), part[0]) for part in found)
    first = max(place for place, (_, offset, _) in enumerate(parts) if offset == 0)
    content = b""
    for _, offset, part in parts[first:]:
        content = content[:offset] + store.read(part)
    return content


@contextlib.contextmanager
def place_to_write(url: BucketUrl) -> Iterator[Path]:
    """Yields an empty folder for `url`, locked against other processes of this machine.

    `fetch` downloads the bucket's files into it.

    Raises:
      BlockingIOError: if another process of this machine writes there.
    """
    copy = _copy(WRITTEN, url)
    digest = hashlib.sha256(str(url).encode()).hexdigest()[:32]
    lock = copies_folder() / _LOCKS / digest
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir(parents=True, exist_ok=True)
        yield copy


def _copy(kind: str, url: BucketUrl) -> Path:
    return copies_folder() / kind / url.scheme / url.bucket / url.folder


def _stays(name: str) -> bool:
    folders = name.split("/")[:-1]
    return any(folder in _LARGE or folder.endswith(FILES) for folder in folders)
