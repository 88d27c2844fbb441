"""The sources of Python's own standard library, some of its packages held out."""

import os
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

HELD_OUT = ("email", "http", "urllib", "xml")
LEFT_OUT = ("encodings", "pydoc_data")  # tables of characters, and the manual as strings
LONG_LINE = 20  # bytes; `shared_lines` tells of longer ones

_VALIDATION_SHARE = 10  # one in so many of `max_bytes`
_HELD_OUT_PATHS = tuple(f"{package}/" for package in HELD_OUT)
_LEFT_OUT_PATHS = tuple(f"{package}/" for package in LEFT_OUT)
_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


def sources(max_bytes: int | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """What to train on and what to hold out, each from path to text in the order of the paths.

    Whole packages are held out, `HELD_OUT`, so that no text is near one of the other side. Those of
    `LEFT_OUT`, which are hardly code, are on neither. Of `max_bytes` what is held out gets a tenth,
    and a file that does not fit beside those before it is left out.
    """
    texts = _read_sources(Path(sysconfig.get_paths()["stdlib"]))
    validation = {path: text for path, text in texts.items() if path.startswith(_HELD_OUT_PATHS)}
    elsewhere = (*_HELD_OUT_PATHS, *_LEFT_OUT_PATHS)
    train = {path: text for path, text in texts.items() if not path.startswith(elsewhere)}
    if max_bytes is None:
        return train, validation
    held_out_bytes = max_bytes // _VALIDATION_SHARE
    return _fitting(train, max_bytes - held_out_bytes), _fitting(validation, held_out_bytes)


def shared_lines(train: Iterable[str], validation: Iterable[str]) -> float:
    """The share of `validation`'s bytes that are lines of more than 20 bytes which stand in `train`
    as well, verbatim, with their newlines."""
    known = {line for text in train for line in text.split("\n")}
    lines = [line for text in validation for line in text.split("\n")]
    sizes = [(line, len(line.encode())) for line in lines]
    shared = sum(size + 1 for line, size in sizes if size > LONG_LINE and line in known)
    return shared / sum(len(text.encode()) for text in validation)


def _fitting(texts: Mapping[str, str], most: int) -> dict[str, str]:
    """Each of `texts` that fits into `most` bytes beside those before it."""
    found = {}
    for path, text in texts.items():
        size = len(text.encode())
        if size <= most:
            found[path] = text
            most -= size
    return found


def _read_sources(root: Path) -> dict[str, str]:
    """Relative path to text, sorted by path, of the files below `root` that are documents."""
    texts: dict[str, str] = {}
    for relative in _python_files(root):
        try:
            text = (root / relative).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            texts[relative] = text
    return texts


def _python_files(root: Path) -> list[str]:
    """The sorted relative paths of the .py files below `root` outside excluded folders."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        relative = Path(folder).relative_to(root)
        found += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)
