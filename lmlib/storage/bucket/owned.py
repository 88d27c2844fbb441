"""An object in a bucket with one owner at a time, which another process may take over.

The server accepts a write only if the object is as the writer last saw it. A takeover is therefore
an ordinary write, and later writes of an earlier owner are refused, however late they arrive.
"""

import errno
import json
import secrets
from typing import Any

from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.bucket.store import BucketStore, Found
from lmlib.storage.stored_json import parse_json

_OWNER = "owner"


class TakenOverError(BucketError):
    """Another owner has taken over the object, or it was deleted.

    Attributes:
      content: the object's content; `None` if it was deleted.
    """

    content: bytes | None = None


class OwnedObject:
    """A JSON object with its content's entries, its owner, and a random text.

    Not thread-safe.
    """

    def __init__(self, store: BucketStore, name: str, owner: str | None = None):
        """`store` may be replaced by one with another patience; `owner` is a random text."""
        self.store = store
        self._name = name
        self._owner = owner or secrets.token_hex(8)
        self._last: Found | None = None  # as last written by this process

    def found(self) -> Found:
        """Returns the object as it is now."""
        return self.store.found(self._name)

    def take(self, content: dict[str, Any], before: Found) -> bool:
        """Makes this process the owner if the object still equals `before`; True on success."""
        encoded = self._encoded(content)
        found = self.store.replace(self._name, encoded, before)
        self._last = found
        return found.content == encoded

    def write(self, content: dict[str, Any]) -> None:
        """Replaces the content that this process wrote last.

        Raises:
          TakenOverError: if the object has another owner; nothing was written.
          BucketError: if the bucket cannot be written. The object then has this content or the
            previous one, and the next call corrects it.
        """
        assert self._last is not None
        encoded = self._encoded(content)
        while self._last.content != encoded:
            found = self.store.replace(self._name, encoded, self._last)
            # Different content by this process is from an earlier call that seemed to fail.
            if found.content is None or _owner_of(found.content) != self._owner:
                place = f"{self.store.url}/{self._name}"
                taken_over = TakenOverError(
                    errno.EBUSY,
                    f"cannot write {place}: another process has begun to write there since, or the "
                    "object was deleted",
                )
                taken_over.content = found.content
                raise taken_over
            self._last = found

    def _encoded(self, content: dict[str, Any]) -> bytes:
        # S3 distinguishes an object's states by content, so no two may be equal.
        own = {_OWNER: self._owner, "random": secrets.token_hex(8)}
        return json.dumps({**own, **content}, indent=1).encode()


def _owner_of(content: bytes) -> Any:
    try:
        return parse_json(content)[_OWNER]
    except (ValueError, KeyError, TypeError):
        return None
