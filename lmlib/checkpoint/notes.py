"""The notes of a checkpoint: a JSON object stored with its arrays, verified when read."""

import json
from pathlib import Path
from typing import Any

from lmlib.checkpoint.folders import files_of
from lmlib.checkpoint.manifest import DamagedCheckpointError, Manifest, digest_of
from lmlib.storage.bucket.failures import BucketError
from lmlib.storage.stored_json import parse_json

NOTES_FILE = "notes/notes.json"
_LARGEST = 64 << 20  # bytes; parsed, they may take twenty times as much memory


def copied(notes: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of `notes` made through JSON; raises ValueError if JSON cannot hold them."""
    try:
        return json.loads(json.dumps(notes))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the notes cannot be saved as JSON: {error}") from error


def read_notes(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Returns the notes of a step.

    Raises:
      DamagedCheckpointError: if the bytes differ from the saved ones, or are not a JSON object.
    """
    name = NOTES_FILE
    saved = manifest.files.get(name)
    if saved is None or saved.size > _LARGEST:
        raise DamagedCheckpointError(folder, name, "is not in the manifest or far too large")
    try:
        content = files_of(folder).read(name)
        if digest_of(content) != saved.digest:
            raise DamagedCheckpointError(folder, name, "has other bytes than were saved")
        notes = parse_json(content)
    except (DamagedCheckpointError, BucketError):
        raise
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(folder, name, f"cannot be read: {error!r}") from error
    if not isinstance(notes, dict):
        raise DamagedCheckpointError(folder, name, "is not a JSON object")
    return notes
