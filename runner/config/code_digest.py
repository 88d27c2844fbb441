"""A digest of the code that a run's program is made of."""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import fiddle as fdl

import lmlib
from runner.config.text import nodes


def code_digest(cfg: fdl.Config) -> str:
    """The digest of lmlib's sources and of the files that define what `cfg` names."""
    total = hashlib.sha256()
    for file in sorted(set(_sources(cfg))):
        total.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _sources(cfg: fdl.Config) -> Iterable[Path]:
    for folder in lmlib.__path__:
        yield from Path(folder).rglob("*.py")
    for module in {fdl.get_callable(node).__module__ for node in nodes(cfg)}:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None:
            yield Path(file)
