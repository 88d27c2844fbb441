"""Writes a file whole: a reader finds the old content or the new, even after a kill."""

import contextlib
import os
import secrets
from pathlib import Path

UNFINISHED = ".unfinished"  # the ending of the file that is written first


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Puts `content` in the place of the file `path` in one step, and durably.

    The content goes to a new file `.<name>.<random>.unfinished` in the same folder, which is then
    renamed. File and folder are on disk when this returns, so that neither a kill nor a power cut
    leaves half a file. Several processes may write the same file at once: one of them comes last,
    and the file is all its own. An error removes the new file; only a kill can leave it there.

    Args:
      content: a `str` is encoded as UTF-8, its line ends as they are.

    Raises:
      OSError: if the folder is absent, full or not writable; the old file is then untouched. An
        error of the last step, in which the folder is made durable, finds the new file in place.
    """
    path = Path(path)
    encoded = content.encode("utf-8") if isinstance(content, str) else content
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    try:
        with open(unfinished, "xb") as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
