"""A sweep's folder: `sweep.json` lists its points, and each point is a run in a subfolder.

{"format": 2, "experiment": "experiments/quickstart", "config": {"steps": "100", …},
 "points": [{"name": "peak_lr=0.001,seed=0", "settings": {"optimizer.peak_lr": "0.001", …}}, …]}

`config` has all settings of the first point, to detect a different experiment; `experiment` is for
readers.
"""

import collections
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from lmlib.runs.run import SWEEP, Run, points_in
from lmlib.runs.settings import checked_settings
from lmlib.storage.atomic_file import make_folder, write_atomically
from lmlib.storage.local_folder import local_folder
from lmlib.storage.stored_json import read_json
from lmlib.storage.unlinked import unlinked
from runner.command_line.paths import check_can_be_made
from runner.config.text import changed_paths
from runner.errors import ConfigError, user_errors

Settings = Mapping[str, str]  # paths of parameters to literals, as text
LONGEST = 100  # characters of a name; file systems allow 255, but paths have a limit too
OUTPUT = "output"  # subfolder with the output of the points' processes
_FORMAT = 2
_SHOWN = 3  # names in a message
_DIGEST = 8
_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+-]*")


@dataclasses.dataclass(frozen=True)
class Point:
    """A run of a sweep: its folder, which has its name, and its settings by path, as text."""

    workdir: Path
    settings: Settings

    @property
    def name(self) -> str:
        return self.workdir.name

    @property
    def run(self) -> Run:
        return Run(self.workdir)

    @property
    def finished(self) -> bool:
        try:
            return self.run.finished
        except (OSError, ValueError):  # damaged: the run will be made again
            return False


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The content of `sweep.json`."""

    folder: Path
    experiment: str
    config: Settings
    points: tuple[Point, ...]

    def write(self) -> None:
        content = {
            "format": _FORMAT,
            "experiment": self.experiment,
            "config": dict(self.config),
            "points": [{"name": p.name, "settings": dict(p.settings)} for p in self.points],
        }
        make_folder(self.folder)
        write_atomically(self.folder / SWEEP, json.dumps(content, indent=1) + "\n")


def checked_folder(path: str | None) -> Path:
    """Returns the absolute --workdir; raises ConfigError unless missing, empty or a sweep."""
    if not path:
        raise ConfigError("give --workdir, the folder for the sweep and its runs")
    with user_errors():
        folder = local_folder(path).absolute()
        check_can_be_made(folder)
        if not folder.exists() or (folder / SWEEP).exists():
            return folder
        if not folder.is_dir():
            raise ConfigError(f"--workdir={folder} is a file; name a folder")
        names = sorted(each.name for each in folder.iterdir() if each.name[0] != ".")
    if names:
        shown = ", ".join(names[:_SHOWN])
        raise ConfigError(f"--workdir={folder} holds {shown}, and no {SWEEP}: use another folder")
    return folder


def planned(
    folder: Path,
    experiment: str,
    points: Sequence[Settings],
    config_of: Callable[[Settings], Settings],
    add: bool,
) -> Sweep:
    """Returns the sweep of `points` in `folder`, keeping existing names. Writes nothing.

    Raises ConfigError if sweep.json is damaged or of another sweep. `config_of` returns a point's
    settings. With `add`, an existing sweep takes new points, and keeps those left out now.
    """

    def named(points: Sequence[Settings], others: Sequence[Point]) -> tuple[Point, ...]:
        names = names_of(points, [each.name for each in others])
        pairs = zip(names, points, strict=True)
        return tuple(Point(folder / name, dict(each)) for name, each in pairs)

    if not (folder / SWEEP).exists():
        return Sweep(folder, experiment, config_of(points[0]), named(points, ()))
    before = read_sweep(folder)
    config = config_of(before.points[0].settings)
    if config != before.config:
        changed = changed_paths(before.config, config)
        raise ConfigError(
            f"{folder} has the runs of another sweep, whose experiment ({before.experiment}) "
            f"differs in {', '.join(changed)}: give another --workdir, or the same settings"
        )
    known = [dict(each.settings) for each in before.points]
    new = named([each for each in points if each not in known], before.points)
    gone = [each for each in before.points if each.settings not in points]
    if (new or gone) and not add:
        told = [f"is missing {_listed(gone)}"] * bool(gone) + [f"has {_listed(new)}"] * bool(new)
        raise ConfigError(
            f"{folder} is a sweep of {len(known)} points, and this command {' and '.join(told)}: "
            "give the same points, --add_points for those of both, or another --workdir"
        )
    return dataclasses.replace(before, points=(*before.points, *new))


def read_sweep(folder: Path) -> Sweep:
    """Reads the sweep in `folder`; raises ConfigError if there is none, or it is damaged."""
    try:
        content = read_json(unlinked(folder, SWEEP))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r:.40} instead of {_FORMAT}")
        points = points_in(content)
        if not points or not all(map(is_safe, points)):
            raise ValueError(f"these are not names of points: {[*points]!r:.80}")
        found = tuple(Point(folder / name, settings) for name, settings in points.items())
        return Sweep(folder, str(content["experiment"]), checked_settings(content["config"]), found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / SWEEP} cannot be read: {error!r:.200}") from error


def names_of(points: Sequence[Settings], taken: Iterable[str] = ()) -> list[str]:
    """Returns a distinct name for each of `points`, safe for case-insensitive file systems.

    Names differ from `taken`. Other points change a point's name only if two would be equal.
    """
    labels = _labels({path for point in points for path in point})
    names = [
        ",".join(f"{labels[path]}={_safe(value)}" for path, value in point.items()) or "base"
        for point in points
    ]
    count = collections.Counter(name.casefold() for name in [*names, *taken])
    return [
        _with_digest(name, point) if len(name) > LONGEST or count[name.casefold()] > 1 else name
        for name, point in zip(names, points, strict=True)
    ]


def is_safe(name: str) -> bool:
    """True if `names_of` could return `name`."""
    return len(name) <= LONGEST and bool(_SAFE.fullmatch(name))


def _labels(paths: set[str]) -> dict[str, str]:
    """Returns the shortest unambiguous suffix of each path."""
    found = {}
    for path in paths:
        ends = [path.split(".", cut)[-1] for cut in range(path.count("."), -1, -1)]
        unique = (e for e in ends if sum(f".{other}".endswith(f".{e}") for other in paths) == 1)
        found[path] = _safe(next(unique, path))
    return found


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", text.strip("'\"")).strip("_") or "_"


def _with_digest(name: str, point: Settings) -> str:
    digest = hashlib.sha256(json.dumps(sorted(point.items())).encode()).hexdigest()[:_DIGEST]
    return f"{name[: LONGEST - _DIGEST - 1]}-{digest}"


def _listed(points: Sequence[Point]) -> str:
    more = f" and {len(points) - _SHOWN} more" if len(points) > _SHOWN else ""
    return ", ".join(each.name for each in points[:_SHOWN]) + more
