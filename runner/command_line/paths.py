"""Checks early that a file or folder can be created at a path that the user gave."""

import os
from pathlib import Path

from runner.errors import ConfigError

ROOM = 512  # bytes of the longest path in a run's folder, relative to the folder


def check_can_be_made(path: Path, room: int = ROOM) -> None:
    """Checks that a file or folder can be created at `path`.

    Args:
      room: bytes that paths below `path` need.
    """
    whole = path.absolute()
    there = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
    if there.is_symlink() and not there.exists():
        raise ConfigError(
            f"{path} cannot be made: {there} is a link to {there.readlink()}, and nothing is there"
        )
    if there != whole and not there.is_dir():
        raise ConfigError(f"{path} cannot be made: {there} is no folder")
    folder = there if there.is_dir() else there.parent
    longest = max(whole.parts, key=lambda part: len(os.fsencode(part)))
    name_bytes = os.pathconf(folder, "PC_NAME_MAX")
    if len(os.fsencode(longest)) > name_bytes:
        raise ConfigError(
            f"{path} cannot be made: the name {longest:.40}… has {len(os.fsencode(longest)):,} "
            f"bytes, and the file system takes {name_bytes:,}"
        )
    path_bytes = os.pathconf(folder, "PC_PATH_MAX")
    if len(os.fsencode(whole)) + room > path_bytes:
        raise ConfigError(
            f"{path} cannot be made: it has {len(os.fsencode(whole)):,} bytes, and the file system "
            f"takes {path_bytes:,}, of which {room:,} are kept for what lies in it"
        )
