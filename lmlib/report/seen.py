"""Runs as a page shows them: with names that tell them apart, those of one kind together."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from lmlib.runs.goodput import read_starts
from lmlib.runs.run import Run, difference, find_runs
from lmlib.runs.series import Measurements
from lmlib.runs.settings import last_name
from lmlib.terminal.text import shown

_SILENT_SECONDS = 60.0  # a lock is renewed every ten
_KILLED = "its process ended without a word, killed say; the same command goes on"


@dataclasses.dataclass(frozen=True)
class Seen:
    """A run of a page.

    Args:
      run: what its files say now.
      name: tells it from the other runs of the page; its control characters are shown.
      group: the name of the runs that differ from it in seeds alone, itself included.
      measurements: its metrics.
    """

    run: Run
    name: str
    group: str
    measurements: Measurements

    @functools.cached_property
    def state(self) -> tuple[str, str]:
        """How the run stands, in a word, and the reason, or nothing. A run whose last start left no
        word of its end is "running" as long as its lock is renewed."""
        if self.run.finished:
            return "finished", ""
        starts, _ = read_starts(self.run.path)
        if starts and starts[-1].ended:
            return shown(starts[-1].ended), shown(starts[-1].reason)
        with contextlib.suppress(OSError):
            if time.time() - (self.run.path / "lock").stat().st_mtime < _SILENT_SECONDS:
                return "running", ""
        return "not running", _KILLED if starts else ""


class Watched:
    """The runs in `places`, workdirs or folders that hold some, as they are whenever they are asked
    for; of their metrics only what is new is read again."""

    def __init__(self, places: Iterable[str | os.PathLike[str]]):
        self._places = list(places)
        self._measurements: dict[Path, Measurements] = {}

    def now(self) -> list[Seen]:
        """The runs that are there.

        Raises:
          ValueError: naming a place that has no run, or a file that is damaged.
          OSError: if a file cannot be read.
        """
        runs = find_runs(self._places)
        found = []
        called = zip(runs, names([run.path for run in runs]), groups(runs), strict=True)
        for run, name, group in called:
            measurements = self._measurements.setdefault(run.path, Measurements(run.path))
            measurements.update()
            found.append(Seen(run, name, group, measurements))
        return found


def seen(places: Iterable[str | os.PathLike[str]]) -> list[Seen]:
    """The runs in `places`; raises as `Watched.now`."""
    return Watched(places).now()


def names(paths: Sequence[Path]) -> list[str]:
    """What is different of the paths: of one its last part, of several what follows the folder that
    all are in."""
    whole = [path.absolute() for path in paths]
    if len(whole) == 1:
        return [shown(whole[0].name)]
    common = Path(os.path.commonpath(whole))
    return [shown(str(path.relative_to(common))) for path in whole]


def groups(runs: Sequence[Run]) -> list[str]:
    """For each run the settings in which it differs from others, seeds aside."""
    differing = {
        path: values for path, values in difference(runs).items() if last_name(path) != "seed"
    }
    texts = [
        ", ".join(
            f"{_short(path, differing)}={'—' if values[number] is None else values[number]}"
            for path, values in differing.items()
        )
        for number in range(len(runs))
    ]
    return [shown(text) or "all runs" for text in texts]


def _short(path: str, paths: Iterable[str]) -> str:
    """The last part of a path, if no other path ends alike."""
    last = last_name(path)
    return last if sum(last_name(each) == last for each in paths) == 1 else path
