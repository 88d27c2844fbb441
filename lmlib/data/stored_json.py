"""JSON files that may come from a stranger: small, shallow, and with each name once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LARGEST = 16 << 20  # bytes; no metadata of ours comes near
DEEPEST = 100  # objects and lists in each other; more exhaust the stack of whoever walks them


def read_json(file: Path, largest: int = LARGEST) -> Any:
    """What `file` holds.

    Raises:
      OSError: if it cannot be read.
      ValueError: which says why, if it is no ordinary file, larger than `largest` bytes, or no
        JSON in UTF-8.
    """
    return parse_json(read_text(file, largest))


def read_text(file: Path, largest: int = LARGEST) -> str:
    """The UTF-8 text of `file`; raises as `read_json`."""
    if file.exists() and not file.is_file():
        raise ValueError("it is no ordinary file")
    with open(file, "rb") as stream:
        content = stream.read(largest + 1)  # a size that was asked for before may have changed
    if len(content) > largest:
        raise ValueError(f"it has more than {largest:,} bytes")
    return content.decode("utf-8")


def parse_json(text: str) -> Any:
    """What `text` says; raises ValueError if it is no JSON, repeats a name, or is nested deeply."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} deep")
        level, depth = [part for each in level for part in _parts(each)], depth + 1
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


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()
