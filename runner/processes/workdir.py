"""The folder that a run writes: the one that the user names, or a copy of one in a bucket."""

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
from runner.errors import ConfigError
from runner.processes.agreement import agreed, require_same
from runner.processes.lock import ABANDONED_SECONDS, BucketLock, FolderLock, WorkdirLock


@dataclasses.dataclass(frozen=True)
class Workdir:
    """The folder that a run writes.

    Attributes:
      folder: on this machine.
      url: of the bucket's folder that it is a copy of; `None` for a folder on a disk.
      held: of a bucket, the lock that the run holds.
      sync: returns once the bucket has all that was written; raises OSError.
    """

    folder: Path
    url: BucketUrl | None = None
    held: WorkdirLock = dataclasses.field(default_factory=WorkdirLock)
    sync: Callable[[], None] = lambda: None

    def lock(self) -> contextlib.AbstractContextManager[WorkdirLock]:
        """A block in which this process has the workdir's lock, if it is the one that writes.

        Raises ConfigError if another run goes on there.
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
    """The workdir `path`, a URL or a copy's path included, for as long as the block runs.

    In a bucket process 0 holds the run's lease, and the small files that it writes into its copy
    are sent. The other processes have a copy to read, made once process 0 has the lease. Every
    process must enter the block.

    Args:
      tell: is told of files that wait for the bucket.
      abandoned_seconds: after so long without a sign of its owner a bucket's folder is free.

    Raises:
      ConfigError: if another run goes on there, the bucket cannot be read or written, or the
        processes were given different ones.
      BucketError: if the last files cannot be sent at the end.
    """
    url = BucketUrl.parsed(os.fspath(path)) or url_of(Path(path))
    require_same({"the workdir": {"bucket": "" if url is None else str(url)}})
    if url is None:
        yield Workdir(local_folder(path))
        return
    with contextlib.ExitStack() as held:
        with agreed(), _mistakes():
            place = None
            if jax.process_index() == 0:
                place = held.enter_context(_written(url, tell, abandoned_seconds))
        with agreed(), _mistakes():
            place = place or Workdir(copy_to_read(url), url)
        yield place


@contextlib.contextmanager
def _written(
    url: BucketUrl, tell: Callable[[str], None], abandoned_seconds: float
) -> Iterator[Workdir]:
    """The workdir of process 0, while it holds the lease."""
    with contextlib.ExitStack() as held:
        folder = held.enter_context(_alone(url))
        lock = held.enter_context(BucketLock(BucketStore(url), abandoned_seconds))
        # Not before: the owner before may have written until then.
        while fetch(url, folder, lock.files) is None:
            lock.check()
        store = BucketStore(url, permit=lock.check)
        # Listed before the folder of this start counts: no later start's files are among them.
        earlier = store.list(START_FILES)
        mirror = Mirror(
            folder,
            store,
            tell=tell,
            object_of=functools.partial(object_of, start=lock.start),
            # The others are sent by `supervise`, or with the checkpoints.
            wanted=lambda name: not name.startswith((f"{LOGS}/", f"{CHECKPOINTS}/")),
        )
        held.callback(mirror.close)
        mirror.sync()
        lock.publish()
        with ThreadPoolExecutor(REQUESTS) as threads:
            list(threads.map(store.delete, earlier))
        yield Workdir(folder, url, lock, mirror.sync)


@contextlib.contextmanager
def _alone(url: BucketUrl) -> Iterator[Path]:
    with contextlib.ExitStack() as held:
        try:
            folder = held.enter_context(place_to_write(url))
        except BlockingIOError as error:
            raise ConfigError(
                f"{url} is in use by a run of this machine: one run at a time; end that one or use "
                "another workdir"
            ) from error
        yield folder


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    """A block in which a bucket's refusal is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from error
