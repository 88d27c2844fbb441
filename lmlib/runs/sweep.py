"""A sweep's folder: `sweep.json` says which settings each of its points has.

Each point is a run in a folder below, of the point's name.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

from lmlib.storage.stored_json import read_json

FILE_NAME = "sweep.json"


def point_of(workdir: Path) -> Mapping[str, str] | None:
    """The settings of the point whose run is in `workdir`, by path, as text; `None` if it is no
    run of a sweep's, or the sweep's file is damaged."""
    file = workdir.parent / FILE_NAME
    try:
        return _points(file, file.stat().st_mtime_ns).get(workdir.name)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@functools.lru_cache(maxsize=16)
def _points(file: Path, changed: int) -> Mapping[str, Mapping[str, str]]:
    """The settings by name, as they were when the file was `changed`."""
    return {each["name"]: dict(each["settings"]) for each in read_json(file)["points"]}
