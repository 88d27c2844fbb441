"""The contents of a folder, to compare two of them."""

from pathlib import Path


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of each file below `folder` by its path there, without what Python compiled."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix != ".pyc"
    }
