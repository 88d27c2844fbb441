"""Files of prompts: each line a JSON object."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from lmlib.data.stored_json import parse_json
from runner.command_line.errors import ConfigError
from runner.inference.prompts import Reader

_SHOWN = 3  # broken lines


class Line(NamedTuple):
    """A line of a file of prompts: its number, from 1, what it says, and its ids."""

    number: int
    given: dict[str, Any]
    ids: list[int]


def digest_of(file: Path) -> str:
    """The SHA-256 of its content; raises OSError if it cannot be read."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_lines(file: Path, reader: Reader) -> list[Line]:
    """The lines of a file, empty ones left out.

    Raises:
      OSError: if it cannot be read.
      ConfigError: which names the broken lines by their numbers, or if there are none at all.
    """
    lines, broken = [], []
    with open(file, "rb") as stream:
        for number, text in enumerate(stream, 1):
            if not text.strip():
                continue
            try:
                given = parse_json(text.decode("utf-8"))
                lines.append(Line(number, given, reader.of_line(given)))
            except ValueError as error:
                broken.append(f"line {number}: {error}")
    if broken:
        more = f"; and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
        raise ConfigError(f"{file}: {'; '.join(broken[:_SHOWN])}{more}")
    if not lines:
        raise ConfigError(f"{file} has no lines")
    return lines
