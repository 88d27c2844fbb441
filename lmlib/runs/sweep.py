"""A sweep's folder: `sweep.json` says which settings each of its points has.

Each point is a run in a folder below, of the point's name.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmlib.runs.settings import checked_settings
from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked

FILE_NAME = "sweep.json"


def point_of(workdir: Path) -> Mapping[str, str] | None:
    """The settings of the point whose run is in `workdir`, by path, as text; `None` if it is no
    run of a sweep's, or the sweep's file is damaged."""
    file = workdir.parent / FILE_NAME
    try:
        return _points(file, file.stat().st_mtime_ns).get(workdir.name)
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=16)
def _points(file: Path, changed: int) -> Mapping[str, Mapping[str, str]]:
    """The settings by name, as they were when the file was `changed`."""
    return dict(points_in(read_json(unlinked(file.parent, file.name))))


def points_in(content: Any) -> list[tuple[str, Mapping[str, str]]]:
    """The name and the settings of each point, of what sweep.json holds.

    Raises:
      ValueError: if they are not as a sweep writes them.
    """
    points = content.get("points") if isinstance(content, dict) else None
    if not isinstance(points, list):
        raise ValueError("it has no list of points")
    found: list[tuple[str, Mapping[str, str]]] = []
    for point in points:
        name, settings = map(point.get, ("name", "settings")) if isinstance(point, dict) else (0, 0)
        if not isinstance(name, str):
            raise ValueError(f"{point!r:.80} is no point with a name and settings")
        found.append((name, checked_settings(settings)))
    return found
