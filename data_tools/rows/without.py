"""A source without some of its rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from data_tools.rows.block import Block, Field, Row, RowSource


class WithoutRows:
    """The rows of `source`, except those whose `Row.where` is in `places`.

    `described` is added to the source's description.
    """

    def __init__(self, source: RowSource, places: Sequence[str], described: Mapping[str, Any]):
        self.field, self.description = source.field, source.description | dict(described)
        self._source = source
        self._removed = np.unique(np.array([*map(_hash, places)], np.uint64))

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """See `RowSource.blocks`."""
        for block in self._source.blocks(shard, shards, position):
            yield block._replace(rows_of=_Others(block.rows_of, self._removed))


@dataclass(frozen=True)
class _Others:
    """Makes rows of a block's content, without those at the `removed` places."""

    rows_of: Callable[[Any, Field], Iterator[Row]]
    removed: np.ndarray  # uint64, sorted: hashes, since there may be many

    def __call__(self, content: Any, field: Field) -> Iterator[Row]:
        for row in self.rows_of(content, field):
            place = np.uint64(_hash(row.where))
            at = np.searchsorted(self.removed, place)
            if at == len(self.removed) or self.removed[at] != place:
                yield row


def _hash(place: str) -> int:
    return xxh3_64_intdigest(place.encode("utf-8", "surrogateescape"))
