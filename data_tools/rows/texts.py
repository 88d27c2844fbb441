"""Texts that a Python program has already."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from data_tools.rows.block import BLOCK_BYTES, Block, Field, Row, TextField


class Texts:
    """A source made of any iterable of texts; one that can be iterated over once is enough."""

    def __init__(self, texts: Iterable[str], description: Mapping[str, Any] | None = None) -> None:
        self.field: Field = TextField()
        self.description = dict(description or {})
        self._texts = texts

    def blocks(self, shard: int, shards: int, position: Any = None) -> Iterator[Block]:
        """See `RowSource.blocks`; there is one shard. Raises ValueError for more."""
        if shards != 1:
            raise ValueError(f"texts from Python make one shard, not {shards}")
        number = position or 0
        texts = islice(iter(self._texts), number, None)
        while True:
            block, characters = [], 0
            for text in texts:
                block.append(text)
                characters += len(text) if isinstance(text, str) else 0
                if characters >= BLOCK_BYTES:
                    break
            if not block:
                return
            yield TextsBlock(number, None, tuple(block))
            number += len(block)


@dataclass(frozen=True)
class TextsBlock(Block):
    texts: tuple[str, ...]

    @property
    def size(self) -> int:
        """See `Block.size`."""
        return sum(len(text) for text in self.texts if isinstance(text, str))

    def rows(self, field: Field) -> Iterator[Row]:
        """See `Block.rows`."""
        for number, text in enumerate(self.texts, start=self.position):
            where = f"document {number}"
            if isinstance(text, str):
                yield Row(where, text)
            else:
                yield Row(where, None, f"is no string but {text!r:.40}")
