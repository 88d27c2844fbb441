"""Where a command makes a folder that others read: on a disk, or in a bucket."""

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from lmlib.storage.bucket.copies import place_to_write
from lmlib.storage.bucket.store import BucketStore
from lmlib.storage.bucket.upload import upload
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import local_folder
from runner.errors import ConfigError


@contextlib.contextmanager
def destination(
    to: str, last: Collection[str], progress: Callable[[int, int], None]
) -> Iterator[Path]:
    """The path at which the block makes the folder `to`. If that is in a bucket, the path is one of
    this machine, and the bucket gets what is there at the end of the block.

    Args:
      last: names of files without which nobody takes the folder for whole; they are sent last.
      progress: is called with the bytes that the bucket has, and those of all files.

    Raises:
      ConfigError: if the folder in the bucket is not empty, or another command makes it.
      BucketError: if the bucket cannot be read or written.
    """
    url = BucketUrl.parsed(to)
    if url is None:
        yield local_folder(to)
        return
    store = BucketStore(url)
    if store.list():
        raise ConfigError(f"--to={to} is not empty: give a new folder")
    with contextlib.ExitStack() as held:
        try:
            copy = held.enter_context(place_to_write(url))
        except BlockingIOError as error:
            raise ConfigError(f"--to={to}: another command of this machine makes it") from error
        held.callback(shutil.rmtree, copy, ignore_errors=True)
        yield copy
        upload(copy, store, last, progress)
