"""An index of computed beginnings of prompts, which later prompts reuse.

A beginning is known by a digest of its tokens, and ends where prompts are cut into chunks.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_REMEMBERED = 4_096  # beginnings that are known, but not stored


class Prefixes:
    """Chooses the beginnings that rows of a cache store; the least recently used one is replaced.

    A prompt's longest beginning is stored, and its longest one that an earlier prompt had too.
    """

    def __init__(self, rows: Sequence[int]):
        self._free = list(rows)
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._row_of)

    def longest(self, beginnings: Sequence[bytes]) -> tuple[int, int]:
        """Returns how many chunks of a prompt are stored, and the row that has them."""
        for chunks in range(len(beginnings), 0, -1):
            if (row := self._row_of.get(beginnings[chunks - 1])) is not None:
                self._row_of.move_to_end(beginnings[chunks - 1])
                return chunks, row
        return 0, -1

    def worth_storing(self, beginnings: Sequence[bytes]) -> set[int]:
        """Returns after how many of its chunks a prompt is to be stored, and remembers it."""
        known = [chunks for chunks, each in enumerate(beginnings, 1) if each in self._known]
        for each in beginnings:
            self._known[each] = None
            self._known.move_to_end(each)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return {*known[-1:], len(beginnings)}

    def store(self, beginning: bytes) -> int | None:
        """Returns the row to copy a beginning to; `None` if it is stored, or no row is free."""
        if beginning in self._row_of or not (self._free or self._row_of):
            return None
        row = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
        self._row_of[beginning] = row
        return row


def beginnings_of(adapter: str | None, prompt: Sequence[int], chunk: int) -> list[bytes]:
    """Returns digests of a prompt's first chunk, its first two, …, all of them full."""
    digest, found = hashlib.blake2b(repr(adapter).encode(), digest_size=16), []
    for start in range(0, len(prompt) - chunk + 1, chunk):
        digest.update(np.asarray(prompt[start : start + chunk], np.int32).tobytes())
        found.append(digest.digest())
    return found
