"""Digests of the code and of the data that a comparison depends on."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from lmlib.data.stored.data_path import data_path
from lmlib.storage.local_folder import folder_to_read
from runner.errors import ConfigError


def digests_of_data(path: str, splits: Iterable[str]) -> dict[str, str]:
    """Returns the digest of the files of each split of the data set at `path`."""
    folder = Path(data_path(folder_to_read(path)))
    found = {}
    for split in sorted(set(splits)):
        total = hashlib.sha256()
        for file in sorted((folder / split).rglob("*")):
            if file.is_file():
                name = file.relative_to(folder).as_posix()
                total.update(f"{name} {digest_of_file(file)}\n".encode())
        found[split] = total.hexdigest()
    return found


def digest_of_file(file: Path) -> str:
    """Returns the SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def digest_of(digests: Mapping[str, str]) -> str:
    """Returns one digest of several."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def check_unchanged(before: Mapping[str, str], after: Mapping[str, str], what: str) -> None:
    """Raises ConfigError if a digest has changed, with the name of the file."""
    for name in sorted({**before, **after}):
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"{what} changed during the comparison: {name} is not the same file, so there is "
                "no verdict. Restore it, and look for the reason in the candidate's module"
            )
