"""The folder on this machine that a path or a URL names."""

import os
import re
from pathlib import Path

from lmlib.storage.bucket.copies import copy_to_read, place_of
from lmlib.storage.bucket.url import BucketUrl

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_AS_PATH = re.compile(r"(gs|s3|r2|az|abfss?|wasbs?|hdfs|https?|ftp|file):/")  # it lost a slash


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The path, with `~` as the home folder; raises ValueError for a URL such as `gs://bucket/run`.

    `Path` would make a folder `gs:` of it.
    """
    text = os.fspath(path)
    if (_URL_AS_PATH if isinstance(path, os.PathLike) else _URL).match(text):
        raise ValueError(
            f"{text} is a URL, and remote folders are not supported here: mount the bucket or "
            "share, with gcsfuse, s3fs or NFS say, and give the mounted folder"
        )
    return Path(os.path.expanduser(path))


def folder_named(path: str | os.PathLike[str]) -> Path:
    """The path of a folder. For a folder in a bucket it stands for the URL, and may be absent.

    Raises as `local_folder`.
    """
    url = BucketUrl.parsed(os.fspath(path))
    return local_folder(path) if url is None else place_of(url)


def folder_to_read(path: str | os.PathLike[str]) -> Path:
    """The path of a folder. For a folder in a bucket, `gs://…` or `s3://…`, it is a copy of its
    small files, as `lmlib.storage.bucket.copies` makes it. Raises as `local_folder`.

    Raises BucketError if the bucket cannot be read.
    """
    url = BucketUrl.parsed(os.fspath(path))
    return local_folder(path) if url is None else copy_to_read(url)
