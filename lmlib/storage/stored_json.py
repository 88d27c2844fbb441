"""Untrusted JSON files: small, shallow, and without repeated names.

All stored JSON is read here, since two parsers may differ in which of two equal names they use.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lmlib.storage.unlinked import read_regular

LARGEST = 16 << 20  # bytes; lmlib's metadata is far smaller
DEEPEST = 100  # nesting depth; more would exhaust the stack of recursive functions
MOST = 2_000_000  # objects and lists; each takes up to thirty times the memory of its text


def read_json(file: Path, largest: int = LARGEST) -> Any:
    """Returns the JSON value in `file`.

    Raises:
      OSError: if it cannot be read.
      ValueError: if it is not a regular file, larger than `largest` bytes, or not JSON in UTF-8.
        The message says which.
    """
    return parse_json(read_regular(file, largest))


def read_text(file: Path, largest: int = LARGEST) -> str:
    """Returns the UTF-8 text of `file`; raises as `read_json`."""
    return read_regular(file, largest).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON text, as UTF-8 if it is bytes.

    Raises ValueError if it is not JSON, repeats a name, is nested too deeply, or has more objects
    and lists than `MOST`.
    """
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
