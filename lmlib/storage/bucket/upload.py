"""A folder that was made on this machine, sent to a bucket."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmlib.storage.bucket.store import REQUESTS, BucketStore

LARGEST = 5 * 2**30  # bytes that S3 takes in one request
_LARGE = 32 * 2**20  # bytes of a file that is sent by itself: it is held in memory


def upload(
    folder: Path,
    store: BucketStore,
    last: Collection[str],
    progress: Callable[[int, int], None],
) -> None:
    """Sends all files of `folder`. Files whose name is in `last` come after all others, so that
    nobody takes the files that a kill leaves for all of them.

    Args:
      progress: is called with the bytes sent and those of all files.

    Raises:
      ValueError: if a file is larger than `LARGEST`; nothing is sent.
      BucketError: if the bucket cannot be written.
    """
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    for file, size in sizes.items():
        if size > LARGEST:
            raise ValueError(
                f"{file.name} has {size / 1e9:.1f} GB, and buckets take {LARGEST / 1e9:.1f} GB at "
                "once: make smaller files"
            )
    done, total = 0, sum(sizes.values())

    def send(file: Path) -> int:
        store.write(file.relative_to(folder).as_posix(), file.read_bytes())
        return sizes[file]

    before = [file for file in sizes if file.name not in last]
    small = [file for file in before if sizes[file] < _LARGE]
    large = [file for file in before if sizes[file] >= _LARGE]
    with ThreadPoolExecutor(REQUESTS) as threads:
        for sent in threads.map(send, small):
            progress(done := done + sent, total)
    for file in (*large, *(file for file in sizes if file.name in last)):
        progress(done := done + send(file), total)
