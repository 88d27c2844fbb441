"""Where a split of a data set lies, or why it is not there."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from lmlib.data.stored.metadata import shard_folders
from lmlib.data.stored.seqax import is_seqax_split


def find_split(path: Path, split: str) -> Path:
    """The folder of `split` in the data set at `path`.

    Raises FileNotFoundError if there is none, which says what to do.
    """
    if not path.is_dir():
        if path.exists():
            raise FileNotFoundError(_pretokenize_first(path, split, "is a file"))
        raise FileNotFoundError(
            f"there is no data set at {path}: make one with python -m data_tools.pretokenize "
            f"--dataset=… --split={split} --tokenizer=… --out={shlex.quote(str(path))}"
        )
    if not is_seqax_split(path / split) and not shard_folders(path / split):
        for folder in (path / split, path):
            if text := next(map(str, _raw_text(folder)), None):
                holds = f"holds text, such as {text}, and no flat tokens"
                raise FileNotFoundError(_pretokenize_first(folder, split, holds))
    if not (path / split).is_dir():
        present = [
            entry.name
            for entry in sorted(path.iterdir())
            if entry.is_dir() and (shard_folders(entry) or is_seqax_split(entry))
        ]
        found = ", ".join(present) or "none"
        held_out = "; pretokenize holds one out with --validation_fraction=0.05"
        raise FileNotFoundError(
            f"{path} has no split {split!r}; it has {found}"
            f"{held_out if split == 'validation' else ''}"
        )
    return path / split


def _raw_text(folder: Path) -> Iterator[Path]:
    """The files in `folder` that `pretokenize` would read, if there is such a folder."""
    endings = (".jsonl", ".ndjson", ".parquet", ".arrow", ".txt", ".md", ".gz", ".zst")
    if folder.is_dir():
        return (file for file in sorted(folder.iterdir()) if file.name.endswith(endings))
    return iter(())


def _pretokenize_first(path: Path, split: str, why: str) -> str:
    return (
        f"{path} {why}: pretokenize it first with python -m data_tools.pretokenize "
        f"--dataset={shlex.quote(str(path))} --split={split} --tokenizer=… --out=…, "
        "and give that folder"
    )
