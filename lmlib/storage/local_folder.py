"""Folders that users name by paths and URLs, and local copies of folders in buckets.

A folder in a bucket, `gs://…` or `s3://…`, has a copy of its small files on this machine
(`lmlib.storage.bucket.copies`), and the copy's path stands for it. The code for buckets is imported
only for such a path, or a URL.
"""

import os
import re
from pathlib import Path

NO_HOME = "this user has no home folder, and XDG_CACHE_HOME names no other"
READ, WRITTEN, MADE = "read", "written", "made"  # kinds of copies, each in its own folder

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_AS_PATH = re.compile(r"(gs|s3|r2|az|abfss?|wasbs?|hdfs|https?|ftp|file):/")  # one slash lost
_BUCKET_URL = re.compile(r"(gs|s3):/")


def cache_folder() -> Path | None:
    """Returns the folder for reproducible files; it may be absent.

    It is `$XDG_CACHE_HOME/lmlib`, or `~/.cache/lmlib` by default. `None` if there is neither, as in
    containers that run as users without a name.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named, "lmlib")
    home = Path(os.path.expanduser("~"))  # stays "~" for an unknown user
    return home / ".cache" / "lmlib" if home.is_absolute() else None


def copies_folder() -> Path:
    """Returns the folder of all copies; raises ValueError without a cache folder."""
    cache = cache_folder()
    if cache is None:
        raise ValueError(f"folders in buckets have a copy here, and {NO_HOME}: set XDG_CACHE_HOME")
    return Path(os.path.realpath(cache / "buckets"))


def in_bucket(path: Path, *kinds: str) -> bool:
    """True if `path` stands for a folder in a bucket.

    Such a path is a copy to read or to write, or one of `kinds`.
    """
    return _copied(path)[0] in (kinds or (READ, WRITTEN))


def shown(path: Path) -> str:
    """Returns the name that the user gave: a URL if `path` is a bucket's copy, or made for one."""
    kind, *parts = _copied(path)
    return f"{parts[0]}://{'/'.join(parts[1:])}" if kind in (READ, WRITTEN, MADE) else str(path)


def local_folder(path: str | os.PathLike[str]) -> Path:
    """Returns the path with `~` expanded; raises ValueError for a URL such as `gs://bucket/run`.

    `Path` would otherwise create a folder `gs:`.
    """
    text = os.fspath(path)
    if (_URL_AS_PATH if isinstance(path, os.PathLike) else _URL).match(text):
        raise ValueError(
            f"{text} is a URL, and remote folders are not supported here: mount the bucket or "
            "share, for example with gcsfuse, s3fs or NFS, and give the mounted folder"
        )
    return Path(os.path.expanduser(path))


def folder_named(path: str | os.PathLike[str], fetch: bool = False) -> Path:
    """Returns `local_folder`, or for a folder in a bucket the path that stands for it.

    That path may be absent, unless `fetch` downloads the folder's small files to it.
    """
    if _BUCKET_URL.match(os.fspath(path)):
        from lmlib.storage.bucket.copies import copy_to_read, place_of
        from lmlib.storage.bucket.url import BucketUrl

        if (url := BucketUrl.parsed(os.fspath(path))) is not None:
            return copy_to_read(url) if fetch else place_of(url)
    return local_folder(path)


def folder_to_read(path: str | os.PathLike[str]) -> Path:
    """Returns `local_folder`, or for a folder in a bucket a copy of its small files.

    Raises BucketError if the bucket cannot be read.
    """
    return folder_named(path, fetch=True)


def _copied(path: Path) -> tuple[str, ...]:
    """Returns the kind of copy that `path` is, its scheme, its bucket, and its folders.

    One empty string for a path that is not a copy.
    """
    if cache_folder() is None or copies_folder() not in path.absolute().parents:
        return ("",)
    return path.absolute().relative_to(copies_folder()).parts
