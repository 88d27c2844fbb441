"""A data set that every machine has: the sources of Python's standard library."""

import contextlib
import glob
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_tools.pretokenize.texts import pretokenize
from data_tools.rows.source import Texts
from data_tools.train_tokenizer.byte_level_bpe import train_byte_level_bpe
from lmlib.data import compressors
from lmlib.data.stored.data_path import data_path
from lmlib.data.stored.metadata import VERSION
from lmlib.storage.local_folder import cache_folder

HELD_OUT = ("email", "http", "urllib", "xml")
LEFT_OUT = ("encodings", "pydoc_data")  # character tables, and the manual as strings

_RECIPE = 4  # increment if the same sources should give other data
_VALIDATION_SHARE = 10  # one byte in ten of `max_bytes`
_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
_PYTHON_VERSION = ".".join(map(str, sys.version_info[:3]))
_SECONDS_OF_A_DAY = 24 * 60 * 60


def standard_library(
    vocab_size: int = 4096, max_bytes: int | None = None, cache: str | None = None
) -> str:
    """Returns a data set with splits `train` and `validation`, made on the first call.

    The documents are the running interpreter's own .py files without its tests, in the order of
    their paths; see `sources` for the splits and `max_bytes`. A byte-level BPE of `vocab_size` is
    trained on the split `train`. `validation` records the sizes of its texts under compressors
    (`lmlib.data.compressors`) that are installed now or at a later call.

    The folder is in `cache`, by default `cache_folder()`, or else in a user-specific temporary
    folder. Its name has the Python version, the settings and a digest of the files. Another process
    may make it at the same time. Raises ValueError if `max_bytes` leaves too little text.
    """
    begun = time.monotonic()

    def report(phase: str) -> None:
        print(f"standard library: {phase} ({time.monotonic() - begun:.1f} s)", file=sys.stderr)

    train, validation = sources(max_bytes)
    if not train or not validation:
        raise ValueError(
            f"max_bytes={max_bytes} leaves {len(train)} file(s) of the standard library to train "
            f"on and {len(validation)} to hold out: at least 1 of each is needed"
        )
    name = _folder_name({**train, **validation}, vocab_size, max_bytes)
    place = cache_folder() if cache is None else data_path(cache)
    problem = "this user has no home folder" if place is None else None
    if place is not None and not (data_path(place) / name).is_dir():
        try:
            place.mkdir(parents=True, exist_ok=True)
            os.rmdir(tempfile.mkdtemp(dir=place))
        except OSError as error:
            if cache is not None:
                raise
            problem = f"{place} cannot be written ({error.strerror})"
    if place is None or problem:
        place = _temporary_folder()
        advice = f"the data goes to {place}, which may not last; set XDG_CACHE_HOME to change it"
        report(f"{problem}, so {advice}")
    folder = data_path(place) / name

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
        try:
            measure_compressors(folder / "validation")
        except OSError as error:  # another user's folder
            report(f"the compressed sizes are not saved: {error}")
        return str(folder)
    with made_whole(folder) as making:
        report(f"read {len(train)} files to train on and {len(validation)} to hold out")
        described = f"byte-level BPE of {vocab_size} on Python {_PYTHON_VERSION}'s standard library"
        tokenizer = train_byte_level_bpe(list(train.values()), vocab_size, described)
        report(f"trained a tokenizer of {tokenizer.vocab_size} ids")
        source: dict[str, Any] = {"standard_library": _PYTHON_VERSION, "max_bytes": max_bytes}
        pretokenize(Texts(list(train.values()), source), tokenizer, making, "train")
        report("wrote the split train")
        source |= {"packages": list(HELD_OUT)}
        held_out = Texts(list(validation.values()), source)
        pretokenize(held_out, tokenizer, making, "validation", gzip_baseline=True)
        measure_compressors(making / "validation")
        report("wrote the split validation")
    report(f"ready in {folder}")
    return str(folder)


def sources(max_bytes: int | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the training texts and the held-out texts, by path, sorted by path.

    The packages in `HELD_OUT` are held out as a whole, so that no text is close to one of the other
    side. The packages in `LEFT_OUT`, which are hardly code, are excluded. The held-out side gets a
    tenth of `max_bytes`; a file that does not fit after the earlier ones is skipped.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[str] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        relative = Path(folder).relative_to(root)
        paths += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    train: dict[str, str] = {}
    validation: dict[str, str] = {}
    for path in sorted(paths):
        package = path.partition("/")[0]
        with contextlib.suppress(UnicodeDecodeError):
            text = (root / path).read_bytes().decode("utf-8")
            if text and package not in LEFT_OUT:
                (validation if package in HELD_OUT else train)[path] = text
    if max_bytes is None:
        return train, validation
    held_out_bytes = max_bytes // _VALIDATION_SHARE
    return _fitting(train, max_bytes - held_out_bytes), _fitting(validation, held_out_bytes)


def _fitting(texts: Mapping[str, str], most: int) -> dict[str, str]:
    """Returns the `texts` that fit into `most` bytes together with the earlier ones."""
    found = {}
    for path, text in texts.items():
        size = len(text.encode())
        if size <= most:
            found[path] = text
            most -= size
    return found


@contextlib.contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """Yields an empty folder `<name>.making-…` next to `folder`, which is renamed at the end.

    An error removes it. If several processes make the same folder, the first one's stays. A folder
    left by a killed process is removed when it is a day old.
    """
    for left in folder.parent.glob(f"{glob.escape(folder.name)}.making-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _SECONDS_OF_A_DAY:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.making-", dir=folder.parent, ignore_cleanup_errors=True
    ) as making:
        yield Path(making)
        os.chmod(making, 0o755)  # temporary folders are private by default
        try:
            os.rename(making, folder)
        except OSError:
            if not folder.is_dir():
                raise


def _folder_name(texts: dict[str, str], vocab_size: int, max_bytes: int | None) -> str:
    digest = hashlib.sha256(f"recipe {_RECIPE}, format {VERSION}".encode())
    for path, text in texts.items():
        for part in (path.encode(), text.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    size = "all" if max_bytes is None else f"{max_bytes}-bytes"
    return (
        f"standard-library-python-{_PYTHON_VERSION}-vocabulary-{vocab_size}-{size}-"
        f"{digest.hexdigest()[:16]}"
    )


def _temporary_folder() -> Path:
    """Returns a folder of only this user; raises PermissionError if another user has made it."""
    folder = Path(tempfile.gettempdir(), f"lmlib-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's: set XDG_CACHE_HOME")
    return folder
