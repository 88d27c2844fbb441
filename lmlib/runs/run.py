"""One run's folder, read without JAX and without importing what its config names."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmlib.metrics.log import FILE_NAME as METRICS
from lmlib.metrics.log import read_metrics
from lmlib.runs.result import Final, final_numbers, read_result
from lmlib.runs.settings import FILE_NAME as SETTINGS
from lmlib.runs.settings import read_settings
from lmlib.runs.sweep import point_of
from lmlib.runs.validation import StoredValidation, read_validation
from lmlib.storage.stored_json import read_text
from lmlib.storage.unlinked import unlinked

SAMPLES = "samples"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run has left so far. Each file is read when it is first asked for, and kept.

    Args:
      path: its workdir.
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @functools.cached_property
    def settings(self) -> Mapping[str, str]:
        """Every parameter of its config by path, as `lmlib.runs.settings` has them; empty if
        settings.json is absent.

        Raises ValueError, naming the file, if it is damaged.
        """
        return read_settings(self.path) or {}

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, in the order of steps."""
        return read_metrics(self.path)

    @functools.cached_property
    def result(self) -> dict[str, Any] | None:
        """result.json: the numbers of the final table; `None` before the run has finished.

        Raises ValueError, naming the file, if it is damaged.
        """
        return read_result(self.path)

    @functools.cached_property
    def validation(self) -> StoredValidation | None:
        """validation.json: the last validation, batch by batch; `None` if there is none.

        Raises ValueError, naming the file, if it is damaged.
        """
        return read_validation(self.path)

    @functools.cached_property
    def samples(self) -> Mapping[int, str]:
        """What it sampled, by step; a file that cannot be read, and a link, is left out."""
        found = {}
        for file in sorted((self.path / SAMPLES).glob("*.txt")):
            if file.stem.isdecimal():
                with contextlib.suppress(OSError, ValueError):
                    unlinked(self.path, f"{SAMPLES}/{file.name}")
                    found[int(file.stem)] = read_text(file)
        return found

    @property
    def finished(self) -> bool:
        """Whether it has made all steps of its config. A run that was made longer still has the
        result.json of its earlier end."""
        if self.result is None:
            return False
        made = self.result.get("steps")
        return made is None or self.settings.get("steps") in (None, str(made))

    @functools.cached_property
    def final(self) -> Mapping[str, Final]:
        """The numbers of the whole run by name, as result.json has them; none before it has
        finished. The last that a step measured of a metric has another name."""
        return final_numbers(self.result or {}) if self.finished else {}


def read_run(workdir: str | os.PathLike[str]) -> Run:
    """The run in `workdir`.

    Raises:
      ValueError: if there is none.
    """
    path = Path(workdir)
    if not _is_run(path):
        raise ValueError(f"{path} is no run's workdir: it has no {SETTINGS} or no {METRICS}")
    return Run(path)


def find_runs(places: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """The runs in `places`: workdirs, or folders that hold some, such as a sweep's, at any depth.

    Raises:
      ValueError: naming a place that has none.
    """
    found: dict[Path, Run] = {}
    for place in map(Path, places):
        below = [place] if _is_run(place) else sorted(_below(place))
        if not below:
            raise ValueError(f"there is no run in {place}")
        found |= {path: Run(path) for path in below}
    return list(found.values())


def difference(runs: Iterable[Run]) -> dict[str, tuple[str | None, ...]]:
    """The settings that are not alike in all `runs`, by path: the text that each run has, `None`
    where it has no such setting.

    Of the points of one sweep only what the sweep varies counts, by its own names: all else
    follows from that.
    """
    runs = list(runs)
    every: list[Mapping[str, str | None]] = [{**run.settings} for run in runs]
    points = [point_of(run.path) for run in runs]
    if None not in points and len({run.path.parent for run in runs}) == 1:
        varied = dict.fromkeys(path for point in points for path in point or ())
        every = [
            {path: settings.get(path) or (point or {}).get(path) for path in varied}
            for settings, point in zip(every, points, strict=True)
        ]
    paths = dict.fromkeys(path for settings in every for path in settings)
    found = {path: tuple(settings.get(path) for settings in every) for path in paths}
    return {path: values for path, values in found.items() if len(set(values)) > 1}


def _is_run(path: Path) -> bool:
    return (path / SETTINGS).is_file() and (path / METRICS).is_file()


def _below(folder: Path) -> list[Path]:
    """The workdirs below `folder`; nothing in a workdir is looked at."""
    found = []
    for path, folders, _ in os.walk(folder):
        if _is_run(Path(path)):
            found.append(Path(path))
            folders.clear()
    return found
