"""`settings.json`: every parameter of a run's config by path.

For example `{"optimizer.peak_lr": "0.003"}`. A value is text as written by Python's `repr`; a
callable is stored as its name.
"""

import ast
import collections
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked

FILE_NAME = "settings.json"
_OPENS, _CLOSES, _QUOTES = "([{", ")]}", "'\""


def read_settings(workdir: str | os.PathLike[str]) -> Mapping[str, str] | None:
    """Returns the settings of the latest start of the run in `workdir`; `None` without the file.

    Raises ValueError if the file is damaged; the error names it.
    """
    file = unlinked(workdir, FILE_NAME)
    if not file.exists():
        return None
    try:
        return checked_settings(read_json(file))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def checked_settings(content: object) -> dict[str, str]:
    """Returns `content`; raises ValueError unless it is an object of strings."""
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    for path, text in content.items():
        if not isinstance(text, str):
            raise ValueError(f"the setting {path!r:.80} is {text!r:.40}, not a string")
    return content


def is_below(path: str, names: Iterable[str]) -> bool:
    """True if `path` is one of `names` or a part of one, as `data.files[0].path` is of `data`."""
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in names)


def last_name(path: str) -> str:
    """Returns the last name of a path.

    `peak_lr` for `optimizer.peak_lr`, `weights['a.b']` for `data.weights['a.b']`.
    """
    before, bracket, key = path.partition("[") if path.endswith("]") else (path, "", "")
    return before.rpartition(".")[2] + bracket + key


def shortest_names(paths: Iterable[str]) -> dict[str, str]:
    """Returns the last name of each path, or the whole path if several end in that name."""
    lasts = {path: last_name(path) for path in paths}
    count = collections.Counter(lasts.values())
    return {path: last if count[last] == 1 else path for path, last in lasts.items()}


def value_of(text: str) -> Any:
    """Returns the number, string, bool or `None` written in `text`; any other text unchanged."""
    is_literal = text in ("None", "True", "False") or text[:1] in ("'", '"')
    for read in (ast.literal_eval,) if is_literal else (int, float):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return read(text)
    return text


def split(text: str, at: str) -> Iterator[str]:
    """Splits at the characters `at` that are outside brackets and quotes."""
    part, depth, quote = "", 0, ""
    for character in text:
        if character == at and not depth and not quote:
            yield part
            part = ""
            continue
        part += character
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        else:
            depth += (character in _OPENS) - (character in _CLOSES)
    yield part
