"""Links in folders of Hugging Face models, which come from strangers or from the Hub's cache."""

import os
from pathlib import Path


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
