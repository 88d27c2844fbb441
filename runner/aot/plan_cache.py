"""Cached plans, in the user's cache folder."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import fiddle as fdl

from lmlib.storage.atomic_file import write_atomically
from lmlib.storage.local_folder import NO_HOME, cache_folder
from lmlib.storage.stored_json import parse_json
from runner.config.code import code_digest
from runner.config.text import flattened

# Environment variables that change the compiled program and are not in the config.
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def key(cfg: fdl.Config, *more: object) -> str:
    """Returns a digest of everything that a plan depends on: the config, the code and `more`."""
    environment = [os.environ.get(name) for name in _ENVIRONMENT]
    parts = [flattened(cfg), code_digest(cfg), environment, *map(str, more)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read(key: str) -> dict[str, Any] | None:
    """Returns the content that `write` stored, or `None` if it is missing or unreadable."""
    try:
        found = parse_json(_file(key).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"text", "json"} <= found.keys() else None


def write(key: str, content: dict[str, Any]) -> None:
    """Stores `content`. If the folder is not writable, the plan is made again next time."""
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content))
    except OSError as error:
        print(f"this plan is not cached: {error}", file=sys.stderr)


def _file(key: str) -> Path:
    """Returns the path of the cached plan; raises FileNotFoundError without a cache folder."""
    if (cache := cache_folder()) is None:
        raise FileNotFoundError(NO_HOME)
    return cache / "plans" / f"{key}.json"
