"""Links in untrusted folders.

A link could lead to a private file of the user's, which would then be published with the folder, or
shown on a page of runs.
"""

import os
from pathlib import Path


class LinkError(OSError, ValueError):
    """A link in place of a run's own file or folder."""


def unlinked(folder: str | os.PathLike[str], name: str = "") -> Path:
    """Returns `folder / name` after checking that no part of it below `folder` is a link.

    The folder itself may be a link. The path need not exist.

    Raises:
      LinkError: with the link's path and a remedy.
    """
    path = Path(folder)
    for part in Path(name).parts:
        path = path / part
        check_no_link(path)
    return path


def check_no_link(path: Path) -> None:
    """Raises LinkError, with a remedy, if the file or folder is a link."""
    if path.is_symlink():
        raise LinkError(
            f"{path} is a link, which is not followed in a run's folder: replace it by a copy of "
            "its target"
        )


def check_within_folder(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if `path` is a link that leads out of its folder.

    A snapshot in the cache of `huggingface_hub` consists of links to the blobs of the same
    repository, models--OWNER--NAME/snapshots/COMMIT/FILE to models--OWNER--NAME/blobs/DIGEST
    (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): these are allowed.
    """
    path = Path(path)
    folder, file = Path(os.path.realpath(path.parent)), Path(os.path.realpath(path))
    repository = folder.parents[1] if len(folder.parents) > 1 else folder
    if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
        folder = repository
    if folder not in file.parents:
        raise ValueError(
            f"it is a link to {file}, which is not in its folder: put a copy of the file there "
            "if you want it to be used"
        )
