"""Paths in a run's folder, which may come from a stranger.

A link could lead to a private file of the user's, and pages of runs are shown to others.
"""

import os
from pathlib import Path


class LinkError(OSError, ValueError):
    """A link where a run has files and folders of its own."""


def unlinked(folder: str | os.PathLike[str], name: str = "") -> Path:
    """The path `folder / name`, after a check that no part of it below `folder` is a link. The
    folder itself may be a link. The path need not exist.

    Raises:
      LinkError: with the link's path and a remedy.
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
            f"{path} is a link, which is not followed in a run's folder: replace it by a copy of "
            "its target"
        )
