"""Files of prompts: each line a JSON object."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lmlib.storage.stored_json import LARGEST, parse_json
from runner.errors import ConfigError
from runner.inference.prompts import Reader

_SHOWN = 3  # broken lines


class Line(NamedTuple):
    """A line of a file of prompts: its number, from 1, what it says, and its ids."""

    number: int
    given: dict[str, Any]
    ids: list[int]


def digest_of(file: Path) -> str:
    """The SHA-256 of its content.

    Raises:
      OSError: if it cannot be read.
      ConfigError: if it is no ordinary file: it is read twice, and may have no end.
    """
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is no ordinary file: write the prompts into one")
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_lines(file: Path, reader: Reader) -> list[Line]:
    """The lines of a file, empty ones left out.

    Raises:
      OSError: if it cannot be read.
      ConfigError: which names the broken lines by their numbers, or if there are none at all.
    """
    lines, broken = [], []
    for number, text in enumerate(_texts(file), 1):
        if not text.strip() and len(text) <= LARGEST:
            continue
        try:
            given = _parsed(text)
            lines.append(Line(number, given, reader.of_line(given)))
        except ValueError as error:
            broken.append(f"line {number}: {error}")
    if broken:
        more = f"; and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
        raise ConfigError(f"{file}: {'; '.join(broken[:_SHOWN])}{more}")
    if not lines:
        raise ConfigError(f"{file} has no lines")
    return lines


def _texts(file: Path) -> Iterator[bytes]:
    """Each line; of one that is too long the beginning, after which the file is not read on."""
    with open(file, "rb") as stream:
        while text := stream.readline(LARGEST + 1):
            yield text
            if len(text) > LARGEST:
                return


def _parsed(text: bytes) -> Any:
    """What a line says; raises ValueError if it is too long, or no JSON, which has no NaN."""
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes")
    given = parse_json(text.decode("utf-8"))
    try:
        json.dumps(given, allow_nan=False)
    except ValueError as error:
        raise ValueError("it has a number that JSON does not: NaN, or one beyond 1e308") from error
    return given
