"""The files below a folder in a bucket, as a `Store`."""

import errno
import functools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmlib.storage.bucket.failures import BucketError, lasting, passing
from lmlib.storage.bucket.url import BucketUrl

if TYPE_CHECKING:  # it is imported where a bucket is: most commands need none
    import tensorstore as ts

REQUESTS = 16  # at once
_READING = {"list", "read"}
_ONCE = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}


@dataclass(frozen=True)
class Patience:
    """How long a request is tried, in seconds.

    Attributes:
      answer: until a request without an answer is given up, and tried again.
      bytes_per_second: a large request has the time that its bytes take at this rate in addition.
      first_delay: before the second try; each later delay is twice the one before.
      longest_delay: between two tries.
      total: from the first try on, until it is an error.
    """

    answer: float = 20.0
    bytes_per_second: float = 2e6
    first_delay: float = 0.1
    longest_delay: float = 10.0
    total: float = 180.0


@dataclass(frozen=True)
class Found:
    """An object as it was found.

    Attributes:
      content: `None` if there is no such object.
      generation: another one for each state of the object; on S3, for each content.
    """

    content: bytes | None
    generation: bytes


class BucketStore:
    """Objects whose names begin with a URL's folder. Any thread may use it."""

    def __init__(
        self,
        url: BucketUrl,
        patience: Patience = Patience(),
        permit: Callable[[], None] = lambda: None,
    ):
        """Sends nothing: problems of the bucket appear at the first request.

        Args:
          permit: called before each try of a write or a deletion, which it prevents by raising.
        """
        self.url = url
        self._patience = patience
        self._permit = permit

    def list(self, under: str = "") -> dict[str, int | None]:
        """See `Store`; TensorStore tells no sizes."""
        root = self.url.key("")
        prefix = f"{root}{under}/" if under else root
        # The next character after the slash is the end of the names that begin with the slash.
        import tensorstore as ts

        bounds = ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")
        keys = self._answer("list", under or ".", lambda: self._keys.list(bounds))
        if self.url.scheme == "gs":
            # TensorStore takes a refusal of Google's for the end of the names. To whom may not
            # list, an object that is absent is forbidden.
            self._answer("list", under or ".", lambda: self._keys.read(f"{prefix}.absent"))
        found = [key.decode() for key in keys]  # some emulators tell keys out of bounds
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
            return self.read(name)[start:stop]  # it ends before `stop`
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, "there is no such object", f"{self.url}/{name}")
        return found.value

    def pieces(self, name: str, into: memoryview | None = None) -> Iterator[bytes | memoryview]:
        """See `Store`; all in one piece."""
        content = self.read(name)
        if into is not None:
            fitting = min(len(into), len(content))
            into[:fitting] = content[:fitting]
        yield content

    def write(self, name: str, content: bytes) -> None:
        """Puts `content` in the place of an object, whole, and durably when it returns."""
        key = self.url.key(name)
        self._answer("write", name, lambda: self._keys.write(key, content), len(content))

    def write_if_absent(self, name: str, content: bytes) -> bool:
        """Writes an object that is absent; returns if it was. Of several processes one writes
        it, unless all write the same. A write whose answer was lost finds its own."""
        found = self.found(name)
        if found.content is None:
            found = self.replace(name, content, found)
        return found.content == content

    def found(self, name: str) -> Found:
        """The object as it is now."""
        read = self._answer("read", name, lambda: self._keys.read(self.url.key(name)))
        content = read.value if read.state == "value" else None
        return Found(content, read.stamp.generation)

    def replace(self, name: str, content: bytes, before: Found) -> Found:
        """Writes `content` if the object is still as it was found `before`, which the server
        decides; returns the object as it is now. No two contents of an object may be equal."""
        key, unchanged = self.url.key(name), before.generation
        self._answer(
            "write", name, lambda: self._keys.write(key, content, if_equal=unchanged), len(content)
        )
        return self.found(name)

    def delete(self, name: str) -> None:
        """Deletes an object, which may be absent."""
        self._answer("delete", name, lambda: self._keys.write(self.url.key(name), None))

    @property
    def _keys(self) -> "ts.KvStore":
        return _opened(json.dumps(self.url.key_value_store()))

    def _answer(self, doing: str, name: str, request: Callable[[], Any], size: int = 0) -> Any:
        """The result of `request`, tried again after errors that may pass; raises BucketError."""
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
            except Exception as error:  # TensorStore raises several kinds
                text = str(error)
                if (known := lasting(text)) is not None:
                    raise self._failure(doing, name, *known) from None  # the error may hold secrets
                cause = passing(text)
            waited = time.monotonic() - began
            if waited + delay > patience.total:
                cause = f"{cause}, and so for {waited:.0f} s: try again later"
                raise self._failure(doing, name, errno.EIO, cause) from None
            time.sleep(delay * random.uniform(0.5, 1.0))  # not all processes at once
            delay = min(2 * delay, patience.longest_delay)

    def _failure(self, doing: str, name: str, code: int, cause: str) -> BucketError:
        where = str(self.url) if name == "." else f"{self.url}/{name}"
        return BucketError(code, f"cannot {doing} {where}: {cause}")


def _within(request: Callable[[], Any], seconds: float) -> Any:
    """The result of TensorStore's future; a request that is given up is ended."""
    future = request()
    try:
        return future.result(timeout=seconds)
    finally:
        future.cancel()


@functools.lru_cache(maxsize=16)
def _opened(spec: str) -> "ts.KvStore":
    """The connections of a bucket, made once; `BucketStore` itself tries again."""
    import tensorstore as ts

    retries = {"s3_request_retries": _ONCE, "gcs_request_retries": _ONCE}
    return ts.KvStore.open(json.loads(spec), context=ts.Context(retries)).result()
