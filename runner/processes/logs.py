"""Where a process of several keeps what it prints.

On a disk that is workdir/logs/process_00003.log, to which each start appends. In a bucket nothing
is appended to, and a process may be on another machine at the next start: each start of each has a
folder there, workdir/logs/TIME-HOST-PID/.
"""

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from lmlib.storage.bucket.copies import LOGS, url_of
from lmlib.storage.bucket.mirror import Mirror
from lmlib.storage.bucket.store import BucketStore


def log_of(
    workdir: Path, process: int, tell: Callable[[str], None]
) -> tuple[Path, Callable[[], None]]:
    """The log of `process`, and what sends the last of it where it is at home.

    Args:
      tell: is told of what cannot be sent.
    """
    name, url = f"process_{process:05}.log", url_of(workdir)
    if url is None:
        return workdir / LOGS / name, lambda: None
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = f"{LOGS}/{now}-{socket.gethostname()}-{os.getpid()}"
    home = BucketStore(dataclasses.replace(url, folder=url.key(folder)))
    mirror = Mirror(workdir / folder, home, tell=tell)

    def send() -> None:
        try:
            mirror.close()
        except OSError as error:
            tell(f"WARNING: the last of {url}/{folder}/{name} is not there: {error}")

    return workdir / folder / name, send
