"""The folder that a run writes: the one that the user names, or a copy of one in a bucket."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from lmlib.checkpoint.folders import DIRECTORY as CHECKPOINTS
from lmlib.storage.bucket.copies import LOGS, copy_to_read, fetch, place_to_write, url_of
from lmlib.storage.bucket.mirror import Mirror
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import local_folder
from runner.errors import ConfigError
from runner.processes.agreement import agreed, require_same
from runner.processes.lease import Lease
from runner.processes.lock import FILE_NAME as LOCK


def _nothing() -> None:
    """Of a folder on a disk there is nothing to send, and its lock is all that is to be held."""


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Where a run writes.

    Attributes:
      folder: on this machine.
      url: where it is at home; `None`: there.
      check: raises WorkdirLost if it is another run's now.
      sync: returns once all that was written is where it is at home; raises OSError.
    """

    folder: Path
    url: BucketUrl | None = None
    check: Callable[[], None] = _nothing
    sync: Callable[[], None] = _nothing


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], tell: Callable[[str], None]) -> Iterator[Workdir]:
    """The workdir `path`, a URL or a copy's path included, for as long as the block runs.

    In a bucket process 0 holds the run's lease, and the small files that it writes into its copy
    are sent; the others have a copy to read, as the bucket is once process 0 has the lease. Every
    process must enter the block.

    Raises:
      ConfigError: if another run goes on there, the bucket cannot be read or written, or the
        processes were given different ones.
      BucketError: if what is left cannot be sent at the end.
    """
    url = BucketUrl.parsed(os.fspath(path)) or url_of(Path(path))
    require_same({"the workdir": {"bucket": "" if url is None else str(url)}})
    if url is None:
        yield Workdir(local_folder(path))
        return
    first = jax.process_index() == 0
    with contextlib.ExitStack() as held:
        with agreed():
            place = held.enter_context(_written(url, tell)) if first else None
        with agreed(), _mistakes():
            place = place or Workdir(copy_to_read(url), url)
        yield place


@contextlib.contextmanager
def _written(url: BucketUrl, tell: Callable[[str], None]) -> Iterator[Workdir]:
    """The workdir of process 0, while it holds the lease."""
    with contextlib.ExitStack() as held:
        with _mistakes():
            folder = held.enter_context(_alone(url))
            lease = held.enter_context(Lease(BucketStore(url), tell=tell))
            fetch(url, folder)  # not before: who held the lease may have written until then
        store = BucketStore(url, permit=lease.seconds)
        mirror = Mirror(folder, store, tell=tell, check=lease.check, wanted=_is_the_runs)
        held.callback(mirror.close)
        yield Workdir(folder, url, lease.check, mirror.sync)


def _is_the_runs(name: str) -> bool:
    """And not this machine's own, nor sent by `supervise` or with the checkpoints."""
    return name != LOCK and not name.startswith((f"{LOGS}/", f"{CHECKPOINTS}/"))


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
    """What a bucket refuses at the start is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from error
