"""A data set that every machine has: the sources of Python's own standard library."""

import hashlib
import os
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from data_tools.made_whole import made_whole, remove_unfinished
from data_tools.pretokenize import pretokenize
from data_tools.rows import Texts
from data_tools.train_tokenizer import train_byte_level_bpe
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import VERSION
from lmlib.storage.cache_folder import cache_folder

HELD_OUT_EVERY = 10  # one file in so many is for validation, whatever the other settings

_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
_RECIPE = 3  # to be raised when the same sources should give other data


def standard_library(
    vocab_size: int = 4096, max_bytes: int | None = None, cache: str | None = None
) -> str:
    """The folder of a data set with splits `train` and `validation`, made on the first call.

    The documents are the running interpreter's own .py files without its tests, in the order of
    their paths, up to `max_bytes` of them. Every tenth is held out. A byte-level BPE of
    `vocab_size` is trained on the others. Validation records its length under gzip -9.

    The folder lies in `cache`, by default `cache_folder()`, or where there is none, or it cannot be
    written, in a folder of the user's among the temporary ones. It is named after the Python
    version, the settings and a digest of the files; another process may make it at the same time.
    Raises ValueError if `max_bytes` leaves fewer than two files.
    """
    begun = time.monotonic()

    def report(phase: str) -> None:
        print(f"standard library: {phase} ({time.monotonic() - begun:.1f} s)", file=sys.stderr)

    def made_in_a_temporary_folder(reason: str) -> str:
        own = _temporary_folder()
        report(
            f"{reason}, so the data goes to {own}, which may not last; XDG_CACHE_HOME names "
            "another place"
        )
        return standard_library(vocab_size, max_bytes, str(own))

    place = cache_folder() if cache is None else data_path(cache)
    if place is None:
        return made_in_a_temporary_folder("this user has no home folder")
    texts = _read_sources(Path(sysconfig.get_paths()["stdlib"]), max_bytes)
    if len(texts) < 2:
        raise ValueError(
            f"max_bytes={max_bytes} leaves {len(texts)} file(s) of the standard library: at "
            "least 2 are needed, one of them to hold out"
        )
    folder = data_path(place) / _folder_name(texts, vocab_size, max_bytes)
    if folder.is_dir():
        remove_unfinished(folder)
        return str(folder)

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=folder.parent))
    except OSError as error:
        if cache is not None:
            raise
        reason = f"{folder.parent} cannot be written ({error.strerror})"
        return made_in_a_temporary_folder(reason)
    with made_whole(folder) as making:
        documents = list(texts.values())
        validation = documents[::HELD_OUT_EVERY]
        train = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY]
        report(f"read {len(documents)} files")

        name = f"byte-level BPE of {vocab_size} on Python {_python_version()}'s standard library"
        tokenizer = train_byte_level_bpe(train, vocab_size, name)
        report(f"trained a tokenizer of {tokenizer.vocab_size} ids")

        source = {"standard_library": _python_version(), "max_bytes": max_bytes}
        pretokenize(Texts(train, source), tokenizer, making, "train")
        report("wrote the split train")
        held_out = Texts(validation, source)
        pretokenize(held_out, tokenizer, making, "validation", gzip_baseline=True)
        report("wrote the split validation")
    remove_unfinished(folder)
    report(f"ready in {folder}")
    return str(folder)


def _read_sources(root: Path, max_bytes: int | None) -> dict[str, str]:
    """Relative path to text, sorted by path, of the files below `root` that are documents."""
    texts: dict[str, str] = {}
    total = 0
    for relative in _python_files(root):
        content = (root / relative).read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not text:
            continue
        total += len(content)
        if max_bytes is not None and total > max_bytes:
            break
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


def _folder_name(texts: dict[str, str], vocab_size: int, max_bytes: int | None) -> str:
    digest = hashlib.sha256(f"recipe {_RECIPE}, format {VERSION}".encode())
    for path, text in texts.items():
        for part in (path.encode(), text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    size = "all" if max_bytes is None else f"{max_bytes}-bytes"
    return (
        f"standard-library-python-{_python_version()}-vocabulary-{vocab_size}-{size}-"
        f"{digest.hexdigest()[:16]}"
    )


def _python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _temporary_folder() -> Path:
    """Of this user alone; raises PermissionError if another one has made it."""
    folder = Path(tempfile.gettempdir(), f"lmlib-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's: set XDG_CACHE_HOME")
    return folder
