"""The folder on this user's machine for files that can be made again."""

import os
from pathlib import Path

NO_HOME = "this user has no home folder, and XDG_CACHE_HOME names no other"


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/lmlib`, else `~/.cache/lmlib`; it may be absent.

    `None` where there is neither: some containers run as a user that is only a number.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named, "lmlib")
    home = Path(os.path.expanduser("~"))  # which stays "~" if nobody knows the user
    return home / ".cache" / "lmlib" if home.is_absolute() else None
