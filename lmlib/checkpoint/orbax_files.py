"""What Orbax keeps beside the arrays and believes when it reads them, checked before it does."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lmlib.checkpoint.manifest import DamagedCheckpointError

_LARGEST = 16 << 20  # bytes; some hundred for each array


def check_orbax_files(folder: Path, state: str, names: Collection[str]) -> None:
    """Looks at what Orbax says of the arrays in the folder `state` of a step's `folder`.

    Raises:
      DamagedCheckpointError: unless they are plain zarr arrays with the names of their folders,
        and those of `names` are among them.
    """
    tree = f"{state}/_METADATA"
    content = _read(folder, tree)
    described = content.get("tree_metadata")
    if content.get("use_ocdbt") or content.get("use_zarr3") or not isinstance(described, dict):
        raise DamagedCheckpointError(folder, tree, "describes another format")
    if missing := sorted(set(names) - set(map(_name, described.values()))):
        raise DamagedCheckpointError(folder, tree, f"describes no plain array {missing[0]!r:.200}")
    for key, entry in described.items():
        name = _name(entry)
        if name is None or not (folder / state / name / ".zarray").is_file():
            raise DamagedCheckpointError(folder, tree, f"describes no plain array as {key!r:.200}")
    for file in sorted((folder / state / "array_metadatas").glob("*")):
        _read(folder, f"{state}/array_metadatas/{file.name}")


def _name(entry: Any) -> str | None:
    """The name of an array by what Orbax says of it; None if it says something else."""
    match entry:
        case {
            "key_metadata": [{"key": str(name)}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        } if "/" not in name and not name.startswith("."):
            return name
    return None


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        if (folder / name).stat().st_size > _LARGEST:
            raise ValueError(f"more than {_LARGEST:,} bytes")
        content = json.loads((folder / name).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(folder, name, f"cannot be read: {error!r}") from error
    if not isinstance(content, dict):
        raise DamagedCheckpointError(folder, name, "is no JSON object")
    return content
