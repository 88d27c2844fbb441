"""Each key of each golden config.json, null or absent, and the model that transformers makes of it.

`OUTCOMES` has by folder and "key: null" or "key: absent": "same" for unchanged logits, "refuses",
or {"as": value} if another value of the key gives the same logits (null if none does).
"""

import copy
import json
from pathlib import Path
from typing import Any

from hugging_face_families import GOLDEN

FILE = Path(__file__).with_name("changed_keys.json")
OUTCOMES: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}


def content_of(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


def keys_of(content, within=()):
    """Returns the path of each key, also in nested objects."""
    for key, value in content.items():
        yield (*within, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*within, key))


def with_value(content, path, value):
    """`content` with another value of a key; `...` takes it away."""
    changed = copy.deepcopy(content)
    held = changed
    for key in path[:-1]:
        held = held[key]
    held[path[-1]] = value
    if value is ...:
        del held[path[-1]]
    return changed


def cases_of(name):
    """Each case: its name, the path of the key, and the content of config.json."""
    content = content_of(name)
    for path in keys_of(content):
        for word, value in {"null": None, "absent": ...}.items():
            yield f"{'.'.join(path)}: {word}", path, with_value(content, path, value)
