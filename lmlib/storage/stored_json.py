"""JSON files that may come from a stranger: small, shallow, and with each name once.

All stored JSON is read here: of two readers one could take the first of two equal names, the other
the last.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lmlib.storage.regular_file import read_regular

LARGEST = 16 << 20  # bytes; no metadata of ours comes near
DEEPEST = (
    100  # objects and lists in each other; more exhaust the stack of a function that walks them
)
MOST = 2_000_000  # objects and lists; each takes up to thirty times the memory of its text


def read_json(file: Path, largest: int = LARGEST) -> Any:
    """The JSON value in `file`.

    Raises:
      OSError: if it cannot be read.
      ValueError: which says why, if it is not an ordinary file, larger than `largest` bytes, or not
        JSON in UTF-8.
    """
    return parse_json(read_regular(file, largest))


def read_text(file: Path, largest: int = LARGEST) -> str:
    """The UTF-8 text of `file`; raises as `read_json`."""
    return read_regular(file, largest).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """The JSON value in `text`, in UTF-8 if it is bytes; raises ValueError if it is not JSON,
    repeats a name, is nested deeply, or has more objects and lists than `MOST`."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if text.count("[") + text.count("{") > MOST:
        raise ValueError(f"it has more than {MOST:,} objects and lists")
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level, depth = _containers([value]), 0
    while level:
        if depth == DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        parts = (each.values() if isinstance(each, dict) else each for each in level)
        level, depth = _containers(itertools.chain.from_iterable(parts)), depth + 1
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"it has the name {name!r:.80} twice")
            seen.add(name)
    return found


def _containers(values: Iterable[Any]) -> list[Any]:
    return [each for each in values if type(each) is list or type(each) is dict]
