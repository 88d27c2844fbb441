"""Files of a run's folder, which may be a stranger's.

A link in it could lead to what the user alone may read, and pages of runs are shown to others.
"""

import os
from pathlib import Path


class LinkError(OSError, ValueError):
    """A link where a run has files and folders of its own."""


def unlinked(folder: str | os.PathLike[str], name: str = "") -> Path:
    """`folder / name`, of which no part below `folder` is a link; nothing need be there. The folder
    itself may be one, or lie below one.

    Raises:
      LinkError: naming the link, and what to do.
    """
    path = Path(folder)
    for part in Path(name).parts:
        path = path / part
        check_no_link(path)
    return path


def check_no_link(path: Path) -> None:
    """Raises LinkError, naming what to do, if the file or folder is a link."""
    if path.is_symlink():
        raise LinkError(
            f"{path} is a link, which is not followed in a run's folder: put what it leads to in "
            "its place, or give a folder without it"
        )
