"""The files below a folder in a bucket, as a `Store`, and the upload of a whole folder."""

import errno
import functools
import json
import random
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmlib.storage.bucket.failures import BucketError, lasting, passing
from lmlib.storage.bucket.url import BucketUrl

if TYPE_CHECKING:  # imported only for buckets, which most commands don't use
    import tensorstore as ts

REQUESTS = 16  # concurrent
LARGEST = 5 * 2**30  # bytes, S3's limit per request
_LARGE = 32 * 2**20  # bytes; larger files are sent one at a time, since they are held in memory
_READING = {"list", "read"}
_ONCE = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}


@dataclass(frozen=True)
class Patience:
    """Timeouts and retries of requests, in seconds.

    Attributes:
      answer: timeout of a request without an answer, after which it is tried again.
      bytes_per_second: large requests get additional time for their bytes at this rate.
      first_delay: before the second try; doubled for each later one.
      longest_delay: between two tries.
      total: from the first try until an error is raised.
    """

    answer: float = 20.0
    bytes_per_second: float = 2e6
    first_delay: float = 0.1
    longest_delay: float = 10.0
    total: float = 180.0


@dataclass(frozen=True)
class Found:
    """The state of an object when it was read.

    Attributes:
      content: `None` if the object does not exist.
      generation: changes with each state of the object; on S3, with each content.
    """

    content: bytes | None
    generation: bytes


class BucketStore:
    """Objects whose names begin with a URL's folder. Thread-safe."""

    def __init__(
        self,
        url: BucketUrl,
        patience: Patience = Patience(),
        permit: Callable[[], None] = lambda: None,
    ):
        """Sends no request: problems of the bucket appear at the first request.

        Args:
          permit: called before each try of a write or a deletion, which it prevents by raising.
        """
        self.url = url
        self._patience = patience
        self._permit = permit

    def list(self, under: str = "") -> dict[str, int | None]:
        """See `Store`; TensorStore returns no sizes."""
        root = self.url.key("")
        prefix = f"{root}{under}/" if under else root
        # The next character after the slash ends the range of names that begin with the slash.
        import tensorstore as ts

        bounds = ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")
        keys = self._answer("list", under or ".", lambda: self._keys.list(bounds))
        if self.url.scheme == "gs":
            # TensorStore reads a refusal by Google as the end of the names. Without permission to
            # list, an absent object is reported as forbidden.
            self._answer("list", under or ".", lambda: self._keys.read(f"{prefix}.absent"))
        found = [key.decode() for key in keys]  # some emulators return keys out of range
        return {key.removeprefix(root): None for key in found if key.startswith(prefix)}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store`."""
        part = None if (start, stop) == (0, None) else slice(start, stop)
        try:
            found = self._answer(
                "read", name, lambda: self._keys.read(self.url.key(name), byte_range=part)
            )
        except BucketError as error:
            if error.errno != errno.ERANGE:
                raise
            return self.read(name)[start:stop]  # the object ends before `stop`
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, "the object does not exist", f"{self.url}/{name}")
        return found.value

    def pieces(self, name: str, into: memoryview | None = None) -> Iterator[bytes | memoryview]:
        """See `Store`; yields the file in one piece."""
        content = self.read(name)
        if into is not None:
            fitting = min(len(into), len(content))
            into[:fitting] = content[:fitting]
        yield content

    def write(self, name: str, content: bytes) -> None:
        """Replaces an object atomically; it is durable when this returns."""
        key = self.url.key(name)
        self._answer("write", name, lambda: self._keys.write(key, content), len(content))

    def write_if_absent(self, name: str, content: bytes) -> bool:
        """Writes an object if it is absent; True if it was written.

        If several processes write, one succeeds, unless all write the same content. A retried write
        recognises its own earlier success.
        """
        found = self.found(name)
        if found.content is None:
            found = self.replace(name, content, found)
        return found.content == content

    def found(self, name: str) -> Found:
        """Returns the object as it is now."""
        read = self._answer("read", name, lambda: self._keys.read(self.url.key(name)))
        content = read.value if read.state == "value" else None
        return Found(content, read.stamp.generation)

    def replace(self, name: str, content: bytes, before: Found) -> Found:
        """Writes `content` if the object still equals `before`; returns the object as it is now.

        The server decides atomically. No two contents of an object may be equal.
        """
        key, unchanged = self.url.key(name), before.generation
        self._answer(
            "write", name, lambda: self._keys.write(key, content, if_equal=unchanged), len(content)
        )
        return self.found(name)

    def delete(self, name: str) -> None:
        """Deletes an object; it may be absent."""
        self._answer("delete", name, lambda: self._keys.write(self.url.key(name), None))

    @property
    def _keys(self) -> "ts.KvStore":
        return _opened(json.dumps(self.url.key_value_store()))

    def _answer(self, doing: str, name: str, request: Callable[[], Any], size: int = 0) -> Any:
        """Returns the result of `request`, retrying temporary errors; raises BucketError."""
        patience = self._patience
        limit = patience.answer + size / patience.bytes_per_second
        began, delay = time.monotonic(), patience.first_delay
        while True:
            if doing not in _READING:
                self._permit()
            try:
                return _within(request, limit)
            except TimeoutError:
                cause = f"no answer came in {limit:.0f} s"
            except Exception as error:  # TensorStore raises several types
                text = str(error)
                if (known := lasting(text)) is not None:
                    raise self._failure(doing, name, *known) from None  # the error may hold secrets
                cause = passing(text)
            waited = time.monotonic() - began
            if waited + delay > patience.total:
                cause = f"{cause}, and so for {waited:.0f} s: try again later"
                raise self._failure(doing, name, errno.EIO, cause) from None
            time.sleep(delay * random.uniform(0.5, 1.0))  # jitter between processes
            delay = min(2 * delay, patience.longest_delay)

    def _failure(self, doing: str, name: str, code: int, cause: str) -> BucketError:
        where = str(self.url) if name == "." else f"{self.url}/{name}"
        return BucketError(code, f"cannot {doing} {where}: {cause}")


def _within(request: Callable[[], Any], seconds: float) -> Any:
    """Returns the result of TensorStore's future; cancels the request on timeout."""
    future = request()
    try:
        return future.result(timeout=seconds)
    finally:
        future.cancel()


@functools.lru_cache(maxsize=16)
def _opened(spec: str) -> "ts.KvStore":
    """Opens the connections of a bucket, once; retries are left to `BucketStore`."""
    import tensorstore as ts

    retries = {"s3_request_retries": _ONCE, "gcs_request_retries": _ONCE}
    return ts.KvStore.open(json.loads(spec), context=ts.Context(retries)).result()


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
