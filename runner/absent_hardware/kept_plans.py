"""Plans made before, in the user's cache folder."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import fiddle as fdl

from lmlib.storage.local_folder import NO_HOME, cache_folder
from lmlib.storage.stored_json import parse_json
from lmlib.storage.whole_file import write_whole
from runner.config.code import code_digest
from runner.config.text import flattened

# They change what is compiled, and no config tells of them.
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def key(cfg: fdl.Config, **more: object) -> str:
    """A digest of all that a plan depends on: the config, code, and `more`."""
    text = json.dumps(
        {
            "config": flattened(cfg),
            "code": code_digest(cfg),
            "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
            **{name: str(value) for name, value in more.items()},
        }
    )
    return hashlib.sha256(text.encode()).hexdigest()


def read(key: str) -> dict[str, Any] | None:
    """What `write` kept; `None` if nothing, or nothing that can be read."""
    try:
        found = parse_json(_file(key).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"text", "json"} <= found.keys() else None


def write(key: str, content: dict[str, Any]) -> None:
    """Keeps `content`. Where the folder cannot be written to, the plan is made anew next time."""
    try:
        file = _file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content))
    except OSError as error:
        print(f"this plan is not kept for the next time: {error}", file=sys.stderr)


def _file(key: str) -> Path:
    """Raises FileNotFoundError if this user has no cache folder."""
    if (cache := cache_folder()) is None:
        raise FileNotFoundError(NO_HOME)
    return cache / "plans" / f"{key}.json"
