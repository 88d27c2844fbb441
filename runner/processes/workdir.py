"""The folder that a run writes to: a local folder, or the local copy of a bucket's folder."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from lmlib.checkpoint.folders import DIRECTORY as CHECKPOINTS
from lmlib.storage.bucket.copies import (
    LOGS,
    START_FILES,
    copy_to_read,
    fetch,
    object_of,
    place_to_write,
    url_of,
)
from lmlib.storage.bucket.mirror import Mirror
from lmlib.storage.bucket.store import REQUESTS, BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import local_folder
from runner.errors import ConfigError, user_errors
from runner.processes.agreement import agreed, require_same
from runner.processes.lock import ABANDONED_SECONDS, BucketLock, FolderLock, WorkdirLock


@dataclasses.dataclass(frozen=True)
class Workdir:
    """The folder that a run writes to.

    Attributes:
      folder: the path on this machine.
      url: the URL of the bucket's folder if `folder` is a copy; `None` for a folder on a disk.
      held: the run's lock on the bucket's folder.
      sync: waits until the bucket has all files; raises OSError.
    """

    folder: Path
    url: BucketUrl | None = None
    held: WorkdirLock = dataclasses.field(default_factory=WorkdirLock)
    sync: Callable[[], None] = lambda: None

    def lock(self) -> contextlib.AbstractContextManager[WorkdirLock]:
        """Returns a context manager that holds the workdir's lock on process 0.

        Raises ConfigError if another run is active there.
        """
        if self.url is None and jax.process_index() == 0:
            return FolderLock(self.folder)
        return contextlib.nullcontext(self.held)


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str],
    tell: Callable[[str], None],
    abandoned_seconds: float = ABANDONED_SECONDS,
) -> Iterator[Workdir]:
    """Opens a workdir for the duration of the block. Every process must enter the block.

    For a bucket, process 0 holds the run's lease, and the small files that it writes to its local
    copy are uploaded. The other processes get a copy to read, made after process 0 has the lease.

    Args:
      path: a local path, a bucket's URL, or the path of a bucket's local copy.
      tell: called with a message if files wait for the bucket.
      abandoned_seconds: seconds without renewal after which the lease of another run is taken over.

    Raises:
      ConfigError: if another run is active there, the bucket cannot be read or written, or the
        processes have different workdirs.
      BucketError: if the last files cannot be uploaded at the end.
    """
    url = BucketUrl.parsed(os.fspath(path)) or url_of(Path(path))
    require_same({"the workdir": {"bucket": "" if url is None else str(url)}})
    if url is None:
        yield Workdir(local_folder(path))
        return
    with contextlib.ExitStack() as held:
        place = None
        with agreed(), user_errors((OSError,)):
            if jax.process_index() == 0:
                place = held.enter_context(_written(url, tell, abandoned_seconds))
        with agreed(), user_errors((OSError,)):
            place = place or Workdir(copy_to_read(url), url)
        yield place


@contextlib.contextmanager
def _written(
    url: BucketUrl, tell: Callable[[str], None], abandoned_seconds: float
) -> Iterator[Workdir]:
    """Opens the workdir on process 0, which holds the lease during the block."""
    with contextlib.ExitStack() as held:
        try:
            folder = held.enter_context(place_to_write(url))
        except BlockingIOError as error:
            raise ConfigError(
                f"{url} is in use by a run of this machine: end that run or use another workdir, "
                "since only one run at a time can write there"
            ) from error
        lock = held.enter_context(BucketLock(BucketStore(url), abandoned_seconds))
        # Fetched after the lease is taken, since the previous owner may have written until then.
        while fetch(url, folder, lock.files) is None:
            lock.check()
        store = BucketStore(url, permit=lock.check)
        # Listed before `publish`, so that files of later starts cannot be among them.
        earlier = store.list(START_FILES)
        mirror = Mirror(
            folder,
            store,
            tell=tell,
            object_of=functools.partial(object_of, start=lock.start),
            # `supervise` uploads the logs, and checkpoints are uploaded as they are saved.
            wanted=lambda name: not name.startswith((f"{LOGS}/", f"{CHECKPOINTS}/")),
        )
        held.callback(mirror.close)
        mirror.sync()
        lock.publish()
        with ThreadPoolExecutor(REQUESTS) as threads:
            list(threads.map(store.delete, earlier))
        yield Workdir(folder, url, lock, mirror.sync)
