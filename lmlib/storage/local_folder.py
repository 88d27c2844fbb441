"""Which paths name a folder on this machine or mounted there."""

import os
import re
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_URL_AS_PATH = re.compile(r"(gs|s3|r2|az|abfss?|wasbs?|hdfs|https?|ftp|file):/")  # it lost a slash


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The path as it is; raises ValueError for a URL such as `gs://bucket/run`.

    `Path` would make a folder `gs:` of it.
    """
    text = os.fspath(path)
    if (_URL_AS_PATH if isinstance(path, os.PathLike) else _URL).match(text):
        raise ValueError(
            f"{text} is a URL, and remote folders are not supported yet: mount the bucket or "
            "share, with gcsfuse, s3fs or NFS say, and give the mounted folder"
        )
    return Path(path)
