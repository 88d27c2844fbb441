"""Uploads a folder that was made on this machine to a bucket."""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmlib.storage.bucket.store import REQUESTS, BucketStore

LARGEST = 5 * 2**30  # bytes, S3's limit per request
_LARGE = 32 * 2**20  # bytes; larger files are sent one at a time, since they are held in memory


def upload(
    folder: Path,
    store: BucketStore,
    last: Collection[str],
    progress: Callable[[int, int], None],
) -> None:
    """Uploads all files of `folder`, those named in `last` after all others.

    After a kill, the files in `last` are then missing, which marks the folder as incomplete.

    Args:
      progress: called with the bytes sent and the bytes of all files.

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
