"""Runs as a page shows them, with unique names and in groups."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lmlib.metrics.meanings import EVALUATION, Meaning, meaning, title
from lmlib.runs.run import Run, difference, find_runs
from lmlib.runs.series import Measurements, Series
from lmlib.runs.settings import last_name, shortest_names
from lmlib.terminal.text import shown

_LOSSES = {"loss", "training_loss", "evaluation_loss", "validation_loss"}


@dataclasses.dataclass(frozen=True)
class Seen:
    """A run on a page, with a unique name, and its metrics by displayable names.

    Runs that differ only in seeds share a `group`.
    """

    run: Run
    name: str
    group: str
    series: Mapping[str, Series]

    def last(self, metric: str) -> float | None:
        """The last value of a metric; `None` if there is none."""
        found = self.series.get(metric)
        return None if found is None else float(found.values_N[-1])

    def named(self, metric: str) -> str:
        """Returns the metric in words, with the objective's own name of its loss."""
        whole, slash, part = metric.removesuffix("_bytes").partition("/")
        if whole in _LOSSES:
            whole = whole.removesuffix("loss") + shown(self.run.about.loss_name)
        return whole.replace("_", " ") + slash + part

    def meaning(self, metric: str) -> Meaning:
        """Returns the unit, meaning and title of a metric, as the run's objective gives them."""
        general = meaning(metric) or Meaning("", "", "")
        base = metric.partition("/")[0].removeprefix(EVALUATION)
        unit, text = map(shown, self.run.about.metrics.get(base, ("", "")))
        if text and metric.startswith(EVALUATION):
            text += ", on the validation split"
        heading = title(metric)
        if base == "loss" and self.run.about.loss_name != "loss":
            heading = self.named(f"training_{metric}" if metric == base else metric)
            heading = heading[:1].upper() + heading[1:]
        return Meaning(metric, unit or general.unit, text or general.text, heading)


class Watched:
    """The runs in `places`, which are workdirs or folders that contain some.

    Each call of `now` reads only the new lines of their metrics.
    """

    def __init__(self, places: Iterable[str | os.PathLike[str]]):
        self._places = list(places)
        self._measurements: dict[Path, Measurements] = {}

    def now(self) -> list[Seen]:
        """Returns the runs that exist now.

        Raises ValueError if a place has no run or a file is damaged; the error names it.
        """
        runs, found = find_runs(self._places), []
        paths = [run.path.absolute() for run in runs]
        # Names are the paths below the common folder, or the last part of a single path.
        common = Path(os.path.commonpath(paths)) if len(runs) > 1 else paths[0].parent
        for run, path, group in zip(runs, paths, groups(runs), strict=True):
            measurements = self._measurements.setdefault(run.path, Measurements(run.path))
            measurements.update()
            series = {shown(metric): each for metric, each in measurements.series.items()}
            found.append(Seen(run, shown(str(path.relative_to(common))), group, series))
        return found


def seen(places: Iterable[str | os.PathLike[str]]) -> list[Seen]:
    """Returns the runs in `places`; raises as `Watched.now`."""
    return Watched(places).now()


def groups(runs: Sequence[Run]) -> list[str]:
    """Returns, for each run, the settings in which it differs from others, except seeds."""
    differing = {path: x for path, x in difference(runs).items() if last_name(path) != "seed"}
    names = shortest_names(differing)
    texts = []
    for number in range(len(runs)):
        parts = (f"{names[path]}={values[number] or '—'}" for path, values in differing.items())
        texts.append(shown(", ".join(parts)) or "all runs")
    return texts
