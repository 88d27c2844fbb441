"""Locates the folders of data sets and their splits, or explains why they are missing."""

import os
import shlex
from pathlib import Path

from lmlib.data.stored.metadata import shard_folders
from lmlib.storage.local_folder import local_folder

_TEXT = (".jsonl", ".ndjson", ".parquet", ".arrow", ".txt", ".md", ".gz", ".zst")


def data_path(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path: expands `~`, and resolves links and `..`.

    Raises ValueError for a path that TensorStore cannot open.
    """
    real = os.path.realpath(local_folder(path))
    for problem, found in (
        ("it holds a backslash", "\\" in real),
        ("it is not UTF-8", real != os.fsencode(real).decode("utf-8", "replace")),
        ("a folder's name ends in .__lock", ".__lock/" in f"{real}/"),
    ):
        if found:
            raise ValueError(f"{real!r} cannot hold a data set, since {problem}: rename it")
    return Path(real)


def is_seqax_split(folder: Path) -> bool:
    """True if `folder` holds a split in seqax's format."""
    return (folder / "encoded_tokens/.zarray").is_file()


def find_split(path: Path, split: str) -> Path:
    """Returns the folder of `split` in the data set at `path`.

    Raises FileNotFoundError, with a remedy, if there is none.
    """

    def is_split(folder: Path) -> bool:
        return is_seqax_split(folder) or bool(shard_folders(folder))

    def pretokenize_first(folder: Path, why: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"{folder} {why}: pretokenize it first with python -m data_tools.pretokenize "
            f"--dataset={shlex.quote(str(folder))} --split={split} --tokenizer=… --out=…, "
            "and give that folder"
        )

    if not path.exists():
        raise FileNotFoundError(
            f"there is no data set at {path}: make one with python -m data_tools.pretokenize "
            f"--dataset=… --split={split} --tokenizer=… --out={shlex.quote(str(path))}"
        )
    if not path.is_dir():
        raise pretokenize_first(path, "is a file")
    for folder in () if is_split(path / split) else (path / split, path):
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        if text := next((file for file in files if file.name.endswith(_TEXT)), None):
            raise pretokenize_first(folder, f"holds text, such as {text}, and no flat tokens")
    if not (path / split).is_dir():
        present = [each.name for each in sorted(path.iterdir()) if each.is_dir() and is_split(each)]
        held_out = "; --validation_fraction=0.05 holds one out, validation=None trains without"
        raise FileNotFoundError(
            f"{path} has no split {split!r}; it has {', '.join(present) or 'none'}"
            f"{held_out if split == 'validation' else ''}"
        )
    return path / split
