"""The folder that a command creates, on a disk or in a bucket."""

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
    """Yields a local path in which the block creates the folder `to`.

    If `to` is in a bucket, the files are uploaded at the end of the block, and the local ones are
    removed.

    Args:
      to: a local path or a bucket's URL.
      last: names of files that mark the folder as complete; they are uploaded last.
      progress: called with the uploaded bytes and the total bytes.

    Raises:
      ConfigError: if the folder in the bucket is not empty, or another command is creating it.
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
