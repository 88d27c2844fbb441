"""Paths of data sets: as people write them, and as TensorStore takes them."""

import os
from pathlib import Path
from typing import Any

from lmlib.storage.bucket.copies import copy_to_read, url_of
from lmlib.storage.bucket.url import BucketUrl
from lmlib.storage.local_folder import local_folder


def data_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path that `path` means: `~` is the home folder, links and `..` are followed.

    Raises ValueError for a path that TensorStore cannot open.
    """
    real = os.path.realpath(local_folder(path))
    for problem, found in (
        ("it holds a backslash", "\\" in real),
        ("it is not UTF-8", not _is_utf8(real)),
        ("a folder's name ends in .__lock", ".__lock/" in f"{real}/"),
    ):
        if found:
            raise ValueError(f"{real!r} cannot hold a data set, since {problem}: rename it")
    return Path(real)


def data_to_read(path: str | os.PathLike[str]) -> Path:
    """As `data_path`; of a data set in a bucket, a copy of its small files.

    Raises BucketError if the bucket cannot be read.
    """
    url = BucketUrl.parsed(os.fspath(path))
    return data_path(path if url is None else copy_to_read(url))


def file_store(folder: Path) -> dict[str, Any]:
    """TensorStore's specification of a data set's files: in `folder`, or in a bucket if `folder` is
    a bucket's copy. Raises ValueError as `data_path`."""
    if (url := url_of(folder)) is not None:
        return url.key_value_store(f"{url.folder}/")
    return {"driver": "file", "path": f"{data_path(folder)}/"}


def _is_utf8(path: str) -> bool:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:  # Python keeps the bytes of such a name as lone surrogates
        return False
    return True
