"""The manifest of a checkpoint, which lists its files with digests, and the notes beside it.

The digests are 128-bit XXH3. They detect damage, not forgery: the author of a checkpoint also makes
its digests.
"""

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from lmlib.checkpoint.failures import DamagedCheckpointError
from lmlib.checkpoint.folders import files_of
from lmlib.checkpoint.in_bucket.steps import MANIFEST, steps_at
from lmlib.storage.atomic_file import sync, sync_folders, write_atomically
from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.store import NotAFileError, Store
from lmlib.storage.stored_json import parse_json

FORMAT = 1
# The others were written after the manifest by earlier versions; lmlib does not read them.
NOT_COVERED = frozenset({MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt"})
NOTES_FILE = "notes/notes.json"
THREADS = 8  # for reading files

_LARGEST_MANIFEST = 32 << 20  # bytes, enough for 250,000 files
_LARGEST_NOTES = 64 << 20  # bytes; parsed, they may take twenty times as much memory
_ALIGNMENT = 64  # bytes; on CPUs JAX does not copy arrays with this alignment


class SavedArray(NamedTuple):
    """Shape and dtype of a leaf, the dtype as JAX prints it: `bfloat16`, `key<rbg>`."""

    shape: tuple[int, ...]
    dtype: str


class SavedFile(NamedTuple):
    """Size of a file in bytes, and the XXH3-128 digest of its bytes in hexadecimal."""

    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
      step: the number of steps made by the run.
      saved_at: when the arrays were on disk, in UTC: `2026-01-31T12:00:00+00:00`.
      metric: ranks the checkpoint, smaller is better; `None` if it has no rank.
      arrays: by the name of the leaf.
      files: by path relative to the step's folder, with `/` as separator.
    """

    step: int
    saved_at: str
    metric: float | None
    arrays: dict[str, SavedArray]
    files: dict[str, SavedFile]

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(file.size for file in self.files.values())


def write_manifest(
    folder: Path,
    step: int,
    arrays: dict[str, SavedArray],
    known: Mapping[str, SavedFile] | None = None,
) -> Manifest:
    """Writes the manifest of the files below `folder` and syncs them all to the disk.

    Args:
      known: digests that were computed before; each of the other files is read once.

    Raises:
      OSError: if a file cannot be read or the manifest not be written.
    """
    known = known or {}
    names = sorted(files_below(folder).keys() - NOT_COVERED)
    files = {**known, **digests_of(folder, [name for name in names if name not in known])}
    files = {name: files[name] for name in names}
    sync_folders(folder)
    manifest = Manifest(step, utc_now(), None, arrays, files)
    write_atomically(folder / MANIFEST, encode(manifest))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a step's folder, without checking the files.

    Raises:
      DamagedCheckpointError: if it is missing or differs from the written bytes.
    """
    try:
        content = files_of(folder).read(MANIFEST, 0, _LARGEST_MANIFEST + 1)
    except NotAFileError:
        raise DamagedCheckpointError(folder, MANIFEST, "is not a regular file") from None
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpointError(
            folder, MANIFEST, "is missing: it was deleted, or an older version saved this"
        ) from None
    if len(content) > _LARGEST_MANIFEST:
        raise DamagedCheckpointError(folder, MANIFEST, f"has over {_LARGEST_MANIFEST:,} bytes")
    try:
        manifest = _decode(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(folder, MANIFEST, f"cannot be read: {error!r}") from error
    if encode(manifest) != content:
        raise DamagedCheckpointError(folder, MANIFEST, "does not match its own digest")
    if folder.name != str(manifest.step):
        raise DamagedCheckpointError(folder, MANIFEST, f"belongs to step {manifest.step}")
    if (steps := steps_at(folder.parent)) is None:
        return manifest
    kept = steps.kept().get(folder.name)  # the rank is not in the manifest, which never changes
    return manifest if kept is None else dataclasses.replace(manifest, metric=kept.metric)


def check_names_and_sizes(folder: Path, manifest: Manifest) -> None:
    """Compares the files below `folder` with its manifest; opens none.

    Raises:
      DamagedCheckpointError: for the first file, in order of names, that is missing, unknown, not a
        regular file or of another size.
    """
    try:
        found = files_below(folder)
    except FileNotFoundError as error:  # deleted after its folder was listed
        lost = os.path.relpath(error.filename, folder)
        raise DamagedCheckpointError(folder, lost, "is missing") from error
    for name in sorted((found.keys() | manifest.files.keys()) - NOT_COVERED):
        if name not in found:
            raise DamagedCheckpointError(folder, name, "is missing")
        if name not in manifest.files:
            raise DamagedCheckpointError(folder, name, "is not in the manifest")
        saved, size = manifest.files[name].size, found[name]
        if size not in (None, saved):
            reason = f"has {size:,} bytes, but {saved:,} were saved"
            raise DamagedCheckpointError(folder, name, reason)


def check_digests(folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Reads files below `folder` and compares their digests with its manifest.

    Raises:
      DamagedCheckpointError: for the first of `names` that cannot be read or has other bytes.
    """
    files = files_of(folder)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda name: _verify(files, folder, manifest, name), names))


def read_verified(files: Store, folder: Path, name: str, manifest: Manifest) -> np.ndarray:
    """Returns the bytes of a file of a step as uint8[bytes]. They are read once and verified.

    Raises:
      DamagedCheckpointError: if it cannot be read or has other bytes than were saved.
    """
    size = manifest.files[name].size
    spacious = np.empty(size + _ALIGNMENT, np.uint8)
    content = spacious[-spacious.ctypes.data % _ALIGNMENT :][:size]
    _verify(files, folder, manifest, name, memoryview(content))
    return content


def copied_notes(notes: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `notes` made through JSON; raises ValueError if JSON cannot hold them."""
    try:
        return json.loads(json.dumps(notes))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the notes cannot be saved as JSON: {error}") from error


def read_notes(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns the notes of a step, verified.

    Raises:
      DamagedCheckpointError: if the bytes differ from the saved ones, or are not a JSON object.
    """
    saved = manifest.files.get(NOTES_FILE)
    if saved is None or saved.size > _LARGEST_NOTES:
        reason = "is not in the manifest or far too large"
        raise DamagedCheckpointError(folder, NOTES_FILE, reason)
    content = read_verified(files_of(folder), folder, NOTES_FILE, manifest)
    try:
        notes = parse_json(content.tobytes())
    except ValueError as error:
        reason = f"cannot be read: {error!r}"
        raise DamagedCheckpointError(folder, NOTES_FILE, reason) from error
    if not isinstance(notes, dict):
        raise DamagedCheckpointError(folder, NOTES_FILE, "is not a JSON object")
    return notes


def files_below(folder: Path) -> dict[str, int | None]:
    """Returns the sizes in bytes of a step's files by relative path; `None` in a bucket.

    Raises:
      DamagedCheckpointError: for an entry that is neither a file nor a folder.
    """
    try:
        return files_of(folder).list()
    except NotAFileError as error:
        raise DamagedCheckpointError(folder, error.name, "is a link or no ordinary file") from error


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def digest_of(content: bytes) -> str:
    """Returns the XXH3-128 digest in hexadecimal."""
    return xxhash.xxh3_128(content).hexdigest()


def digests_of(folder: Path, names: Sequence[str]) -> dict[str, SavedFile]:
    """Syncs files below `folder` to the disk, in several threads; returns sizes and digests."""

    def synced(name: str) -> SavedFile:
        sync(folder / name)
        return _read(files_of(folder), name)

    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names, threads.map(synced, names), strict=True))


def _verify(
    files: Store, folder: Path, manifest: Manifest, name: str, into: memoryview | None = None
) -> None:
    """Reads a file, `into` a buffer of its size, and compares its digest with the manifest's."""
    try:
        found = _read(files, name, into)
    except BucketError:  # not damage
        raise
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise DamagedCheckpointError(folder, name, reason) from error
    if found != manifest.files[name]:
        reason = f"has other bytes than were saved: digest {found.digest}"
        raise DamagedCheckpointError(folder, name, reason)


def _read(files: Store, name: str, into: memoryview | None = None) -> SavedFile:
    """Returns a file's size and digest in one pass; the bytes that fit go `into` the buffer."""
    digest, size = xxhash.xxh3_128(), 0
    for piece in files.pieces(name, into):
        digest.update(piece)
        size += len(piece)
    return SavedFile(size, digest.hexdigest())


def encode(manifest: Manifest) -> bytes:
    """Returns JSON whose last entry is the digest of the same JSON without that entry."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "step": manifest.step,
        "saved_at": manifest.saved_at,
        "metric": manifest.metric,
        "arrays": {
            name: {"shape": list(array.shape), "dtype": array.dtype}
            for name, array in manifest.arrays.items()
        },
        "files": {
            name: {"bytes": file.size, "xxh3_128": file.digest}
            for name, file in manifest.files.items()
        },
    }
    lines = json.dumps(content, indent=1, allow_nan=False)
    content["digest"] = digest_of(lines.encode("ascii"))
    return json.dumps(content, indent=1, allow_nan=False).encode("ascii") + b"\n"


def _decode(content: bytes) -> Manifest:
    """Parses a manifest; raises one of many errors if `content` is not one."""
    parsed = parse_json(content)
    if parsed["format"] != FORMAT:
        raise ValueError(f"format {parsed['format']!r}, but this version reads {FORMAT}")
    metric = parsed["metric"]
    if metric is not None and not (isinstance(metric, float) and math.isfinite(metric)):
        raise ValueError(f"metric {metric!r}")
    return Manifest(
        step=_count(parsed["step"]),
        saved_at=datetime.datetime.fromisoformat(parsed["saved_at"]).isoformat(),
        metric=metric,
        arrays={
            name: SavedArray(tuple(_count(size) for size in array["shape"]), str(array["dtype"]))
            for name, array in parsed["arrays"].items()
        },
        files={
            name: SavedFile(_count(file["bytes"]), str(file["xxh3_128"]))
            for name, file in parsed["files"].items()
        },
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
