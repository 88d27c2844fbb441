"""Checks early that a file or folder can be created at a path that the user gave."""

import os
from pathlib import Path

from lmlib.storage.local_folder import folder_to_read
from lmlib.storage.unlinked import unlinked
from runner.errors import ConfigError, user_errors

# Any of these shows that the folder belongs to a run. Other names could come from other programs.
_OF_A_RUN = {"config.txt", "checkpoints", "lock", "logs", "run.log"}

# Files and folders that a run reads. They must not be links.
_NO_LINKS = (
    "checkpoints", "config.json", "config.txt", "settings.json", "metrics.jsonl", "result.json",
    "validation.json", "goodput.json", "samples", "starts", "captures",
)  # fmt: skip


_ROOM = 512  # bytes for the paths below a workdir


def chosen_workdir(path: str | None, allow_other_files: bool) -> Path:
    """Returns the workdir, which may not exist yet.

    Raises ConfigError if `path` is missing, an unsupported URL or a file; if a file or folder of
    the run is a link; or if the folder has other files and no run.

    Args:
      path: the value of --workdir.
      allow_other_files: True to accept a folder with other files and no run.
    """
    if not path:
        raise ConfigError("give --workdir, the folder for everything that the run writes")
    with user_errors():
        workdir = folder_to_read(path)
        check_can_be_made(workdir)
        if not workdir.exists():
            return workdir
        if not workdir.is_dir():
            raise ConfigError(f"--workdir={workdir} is a file; name a folder")
        for name in _NO_LINKS:
            unlinked(workdir, name)
        names = sorted(entry.name for entry in workdir.iterdir())
    # Hidden files are ignored, since file browsers, file servers and notebooks create some.
    shown = [name for name in names if not name.startswith(".") and name != "lost+found"]
    if shown and _OF_A_RUN.isdisjoint(shown) and not allow_other_files:
        listed = ", ".join(shown[:3]) + (f" and {len(shown) - 3:,} more" if len(shown) > 3 else "")
        raise ConfigError(
            f"--workdir={workdir} holds {listed}, and no run: use another folder, or give "
            "--allow_other_files to use this one"
        )
    return workdir


def check_can_be_made(path: Path) -> None:
    """Raises ConfigError unless a file, or a folder with the files of a run, can be created."""
    whole = path.absolute()
    there = next(each for each in (whole, *whole.parents) if os.path.lexists(each))
    folder = there if there.is_dir() else there.parent
    longest = max(map(len, map(os.fsencode, whole.parts)))
    length = len(os.fsencode(whole)) + _ROOM
    if there.is_symlink() and not there.exists():
        why = f"{there} is a link to {there.readlink()}, which does not exist"
    elif there != whole and not there.is_dir():
        why = f"{there} is not a folder"
    elif longest > (limit := os.pathconf(folder, "PC_NAME_MAX")):
        why = f"a name in it has {longest:,} bytes, and the file system allows {limit:,}"
    elif length > (limit := os.pathconf(folder, "PC_PATH_MAX")):
        why = f"paths in it have up to {length:,} bytes, and the file system allows {limit:,}"
    else:
        return
    raise ConfigError(f"{path} cannot be created: {why}")
