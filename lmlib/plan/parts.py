"""Named shares of a device's memory, as tables show them."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax

from lmlib.table import columns


@dataclasses.dataclass(frozen=True)
class Part:
    """Something in memory; `advice`: what to change to have less of it."""

    name: str
    bytes: int
    advice: str = ""


AnyPart = TypeVar("AnyPart", bound=Part)


def largest(parts: Iterable[AnyPart], count: int) -> tuple[AnyPart, ...]:
    return tuple(sorted(parts, key=lambda part: part.bytes, reverse=True)[:count])


def bytes_per_device(tree: Any) -> int:
    """Of arrays, or of `ShapeDtypeStruct`s that carry their shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def size_text(size: int) -> str:
    """`size` bytes in GB of 10⁹ bytes; in MB if it is less than a tenth of one."""
    return f"{size / 1e9:,.2f} GB" if size >= 1e8 else f"{size / 1e6:,.2f} MB"


def table(title: str, parts: Sequence[Part]) -> str:
    """The title and an indented line for each part."""
    rows = [(f"  {part.name}", size_text(part.bytes).rjust(10), part.advice) for part in parts]
    return f"{title}\n{columns(rows)}"
