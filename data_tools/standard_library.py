"""A data set that every machine has: the sources of Python's own standard library."""

import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from data_tools.made_whole import made_whole, remove_unfinished
from data_tools.pretokenize import pretokenize
from data_tools.rows import Texts
from data_tools.sources_of_python import HELD_OUT, LONG_LINE, shared_lines, sources
from data_tools.train_tokenizer import train_byte_level_bpe
from lmlib.data import compressors
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import VERSION
from lmlib.storage.cache_folder import cache_folder

_RECIPE = 4  # to be raised when the same sources should give other data


def standard_library(
    vocab_size: int = 4096, max_bytes: int | None = None, cache: str | None = None
) -> str:
    """The folder of a data set with splits `train` and `validation`, made on the first call.

    The documents are the running interpreter's own .py files without its tests, in the order of
    their paths; see `data_tools.sources_of_python.sources` for the splits and `max_bytes`. A
    byte-level BPE of `vocab_size` is trained on the split `train`. `validation` records what
    compressors make of its texts (`lmlib.data.compressors`), those that are installed now or at a
    later call, and in its source how much of it are lines that `train` has as well.

    The folder lies in `cache`, by default `cache_folder()`, or where there is none, or it cannot be
    written, in a folder of the user's among the temporary ones. It is named after the Python
    version, the settings and a digest of the files; another process may make it at the same time.
    Raises ValueError if `max_bytes` leaves nothing to train on or to hold out.
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
    train, validation = sources(max_bytes)
    if not train or not validation:
        raise ValueError(
            f"max_bytes={max_bytes} leaves {len(train)} file(s) of the standard library to train "
            f"on and {len(validation)} to hold out: at least 1 of each is needed"
        )
    folder = data_path(place) / _folder_name({**train, **validation}, vocab_size, max_bytes)

    def measure_compressors(split: Path) -> None:
        known = compressors.read(split)
        missing = [code for code in compressors.available() if code not in known]
        if missing:
            found = compressors.measure(
                validation.values(),
                train.values(),
                missing,
                lambda code: report(f"measuring {code}"),
            )
            compressors.save(split, {**known, **found})

    if folder.is_dir():
        remove_unfinished(folder)
        try:
            measure_compressors(folder / "validation")
        except OSError as error:  # of a folder that is another user's
            report(f"what these make of the texts is not kept: {error}")
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
        shared = shared_lines(train.values(), validation.values())
        report(
            f"read {len(train)} files to train on and {len(validation)} to hold out, {shared:.1%} "
            f"of which are lines of more than {LONG_LINE} bytes that both have"
        )

        name = f"byte-level BPE of {vocab_size} on Python {_python_version()}'s standard library"
        tokenizer = train_byte_level_bpe(list(train.values()), vocab_size, name)
        report(f"trained a tokenizer of {tokenizer.vocab_size} ids")

        source: dict[str, Any] = {"standard_library": _python_version(), "max_bytes": max_bytes}
        pretokenize(Texts(list(train.values()), source), tokenizer, making, "train")
        report("wrote the split train")
        source |= {"packages": list(HELD_OUT), "lines_in_training": round(shared, 4)}
        held_out = Texts(list(validation.values()), source)
        pretokenize(held_out, tokenizer, making, "validation", gzip_baseline=True)
        measure_compressors(making / "validation")
        report("wrote the split validation")
    remove_unfinished(folder)
    report(f"ready in {folder}")
    return str(folder)


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
