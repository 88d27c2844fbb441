"""Folders of runs, read without JAX and without importing the modules that configs name."""

import contextlib
import dataclasses
import functools
import html
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmlib.metrics.log import FILE_NAME as METRICS
from lmlib.metrics.log import read_metrics
from lmlib.runs.goodput import FINISHED, NOT_BEGUN, NOT_RUNNING, RUNNING, Start, read_starts
from lmlib.runs.result import Final, final_numbers, read_result
from lmlib.runs.settings import FILE_NAME as SETTINGS
from lmlib.runs.settings import checked_settings, read_settings, value_of
from lmlib.runs.starts import About, read_about, start_folders
from lmlib.runs.validation import StoredValidation, read_validation
from lmlib.storage.stored_json import read_json, read_text
from lmlib.storage.unlinked import unlinked
from lmlib.terminal.quantities import count_text
from lmlib.terminal.text import shown

if TYPE_CHECKING:
    import pandas

SAMPLES = "samples"
SWEEP = "sweep.json"  # in the folder of a sweep, whose runs are subfolders: their settings
_SILENT_SECONDS = 60.0  # a lock is renewed every ten seconds
_KILLED = "its process ended without a message, perhaps killed; give the same command to continue"


class State(NamedTuple):
    """The state of a run (finished, failed, running …), and the reason if one is recorded."""

    name: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of the run in the workdir `path`. Each is read on first use and cached.

    Settings, result and validation raise ValueError if the file is damaged; the error names it.
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @functools.cached_property
    def settings(self) -> Mapping[str, str]:
        """Every parameter of its config by path; empty if settings.json is absent."""
        return read_settings(self.path) or {}

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, ordered by step."""
        return read_metrics(self.path)

    @functools.cached_property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json, the final table; `None` before the run has finished."""
        return read_result(self.path)

    @functools.cached_property
    def starts(self) -> list[Start]:
        """The starts in goodput.json; damaged ones are left out."""
        return read_starts(self.path)[0]

    @functools.cached_property
    def about(self) -> About:
        """The model and the objective; mostly empty before the first step."""
        return read_about(self.path)

    @functools.cached_property
    def validation(self) -> StoredValidation | None:
        """The content of validation.json, the last validation batch by batch, or `None`."""
        return read_validation(self.path)

    @functools.cached_property
    def samples(self) -> Mapping[int, str]:
        """The sampled texts by step; links and unreadable files are skipped."""
        found = {}
        for file in sorted((self.path / SAMPLES).glob("*.txt")):
            if file.stem.isdecimal():
                with contextlib.suppress(OSError, ValueError):
                    unlinked(self.path, f"{SAMPLES}/{file.name}")
                    found[int(file.stem)] = read_text(file)
        return found

    @property
    def finished(self) -> bool:
        """True if the run has made all steps of its config.

        A run that was extended still has the result.json of its earlier end.
        """
        if self.result is None:
            return False
        made = self.result.get("steps")
        return made is None or self.settings.get("steps") in (None, str(made))

    @functools.cached_property
    def final(self) -> Mapping[str, Final]:
        """The numbers of the whole run, from result.json; empty until the run has finished."""
        return final_numbers(self.result or {}) if self.finished else {}

    @functools.cached_property
    def state(self) -> State:
        """The state; a run that recorded no end is running as long as its lock is renewed."""
        if self.finished:
            return State(FINISHED)
        starts = self.starts
        if starts and starts[-1].ended:
            return State(shown(starts[-1].ended), shown(starts[-1].reason))
        if is_locked(self.path):
            return State(RUNNING)
        if not starts and not (self.path / METRICS).exists():
            return State(NOT_BEGUN)
        return State(NOT_RUNNING, _KILLED if starts else "")

    def status(self, step: float | int | None) -> str:
        """Returns the state in words, with the last `step` if the run has not finished."""
        if self.state.name in (FINISHED, NOT_BEGUN):
            return self.state.name
        of = self.settings.get("steps")
        at = "no step yet" if step is None else f"step {step:,.0f}" + (f" of {of}" if of else "")
        return f"{self.state.name}, {at}"

    def loss_text(self, step: int | None = None) -> str:
        """Returns the loss at `step`, by default the last one, in words; empty if it is unknown.

        At the end this is the final validation loss, or else the final training loss.
        """
        with contextlib.suppress(ValueError, OSError):
            if step is None or step == (self.result or {}).get("steps"):
                for name in ("validation_loss", "training_loss"):
                    if name in self.final:
                        value, unit, _ = self.final[name]
                        return shown(f"{name.replace('_', ' ')} {value:.4f} {unit}".strip())
            for line in reversed(self.metrics):
                if "loss" in line and step in (None, line.get("step")):
                    return f"training loss {line['loss']:.4f}"
        return ""

    def __repr__(self) -> str:
        """Returns the name, state, step, number of parameters and loss, in one line."""
        return f"Run({shown(self.name)}: {', '.join(filter(None, self._summary.values()))})"

    def _repr_html_(self) -> str:
        """Returns a small table, which notebooks show."""
        rows = {"run": shown(str(self.path)), **self._summary}
        with contextlib.suppress(ValueError, OSError):
            rows |= {"loss": "" if self.final else rows.get("loss", ""), "why": self.state.reason}
            for name, (value, unit, over) in self.final.items():
                digits = f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.5g}"
                rows[name] = shown(f"{digits} {unit}".strip() + f" ({over})" * bool(over))
        cells = (
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in rows.items()
            if text
        )
        return f"<table>{''.join(cells)}</table>"

    @property
    def _summary(self) -> dict[str, str]:
        """Returns the state and step, the number of parameters and the loss, in words."""
        try:
            step = self.metrics[-1].get("step") if self.metrics else None
            state = self.status(step)
            if self.finished and step is not None:
                state += f", step {step:,}"
            count = self.about.parameters
            if count is None and "parameters" in self.final:
                count = int(self.final["parameters"].value)
        except (ValueError, OSError) as error:
            return {"state": shown(f"damaged: {error}")}
        parameters = "" if count is None else f"{count_text(count)} parameters"
        return {"state": state, "parameters": parameters, "loss": self.loss_text()}


def is_locked(folder: Path) -> bool:
    """True if a process renews the lock of a run or a sweep in `folder`."""
    with contextlib.suppress(OSError):
        return time.time() - (folder / "lock").stat().st_mtime < _SILENT_SECONDS
    return False


def read_run(workdir: str | os.PathLike[str]) -> Run:
    """Returns the run in `workdir`; raises ValueError if there is none."""
    path = Path(workdir)
    if not _is_run(path):
        raise ValueError(f"{path} is not a workdir of a run: it has no {SETTINGS} or no {METRICS}")
    return Run(path)


def find_runs(places: Iterable[str | os.PathLike[str]]) -> list[Run]:
    """Returns the runs in `places`, at any depth; raises ValueError if a place has none."""
    found: dict[Path, Run] = {}
    for place in map(Path, places):
        below = []
        for path, folders, _ in os.walk(place):
            if _is_run(Path(path)):
                below.append(Path(path))
                folders.clear()  # don't descend into a workdir
        if not below:
            raise ValueError(f"there is no run in {place}")
        found |= {path: Run(path) for path in sorted(below)}
    return list(found.values())


def difference(runs: Iterable[Run]) -> dict[str, tuple[str | None, ...]]:
    """Returns the settings that differ between `runs`, by path; `None` if a run lacks one.

    For points of one sweep these are the settings that the sweep varies, under its own names,
    since all other differences follow from them, and `steps` if one of the runs was extended.
    """
    runs = list(runs)
    every: list[Mapping[str, str | None]] = [{**run.settings} for run in runs]
    points = [_point(run.path) for run in runs]
    if None not in points and len({run.path.parent for run in runs}) == 1:
        varied = dict.fromkeys(path for point in points for path in point or ())
        if any(map(_was_extended, runs)):
            varied["steps"] = None
        every = [
            {path: settings.get(path) or (point or {}).get(path) for path in varied}
            for settings, point in zip(every, points, strict=True)
        ]
    paths = dict.fromkeys(path for settings in every for path in settings)
    found = {path: tuple(settings.get(path) for settings in every) for path in paths}
    return {path: values for path, values in found.items() if len(set(values)) > 1}


def runs(*places: str | os.PathLike[str], steps: bool = False) -> "pandas.DataFrame":
    """Returns a DataFrame with a row for each run in `places`.

    Places are workdirs, or folders that contain some, such as a sweep's. Columns are `run` (its
    workdir), the settings in which the runs differ (NaN where a run lacks one), its `state`,
    `finished`, the last value of each metric, such as `loss`, and the numbers in `Run.final`, such
    as `validation_loss`. With `steps`, there is a row for each step of each run instead.
    """
    import pandas  # slow, and its pyarrow thread would take a malloc arena from training threads

    found = find_runs(places)
    differing = difference(found)
    rows: list[dict[str, Any]] = []
    for number, run in enumerate(found):
        texts = {path: values[number] for path, values in differing.items()}
        settings = {path: value_of(text) for path, text in texts.items() if text is not None}
        lines = run.metrics
        if not steps:
            whole: dict[str, Any] = {"state": run.state.name, "finished": run.finished}
            whole |= {name: value for line in lines for name, value in line.items()}
            lines = [whole | {name: each.value for name, each in run.final.items()}]
        rows += [{"run": str(run.path), **settings, **line} for line in lines]
    table = pandas.DataFrame(rows)
    for path in differing:
        values = [row.get(path, math.nan) for row in rows]
        if None in values:  # pandas would read it as a missing number
            table[path] = pandas.Series(values, dtype=object)
    return table


def points_in(content: Any) -> dict[str, dict[str, str]]:
    """Returns the settings of each point by name, from sweep.json; raises ValueError if damaged."""
    try:
        points = content["points"]
        found = {each["name"]: checked_settings(each["settings"]) for each in points}
    except (KeyError, TypeError) as error:
        raise ValueError(f"its points are damaged ({error!r:.80})") from error
    if len(found) < len(points) or not all(isinstance(name, str) for name in found):
        raise ValueError("its points have no unique names")
    return found


def _is_run(path: Path) -> bool:
    return (path / SETTINGS).is_file() and (path / METRICS).is_file()


def _was_extended(run: Run) -> bool:
    """True if the run's first start had another number of steps."""
    for oldest in start_folders(run.path)[:1]:
        with contextlib.suppress(OSError, ValueError):
            first = read_settings(unlinked(run.path, f"starts/{oldest.name}"))
            return first is not None and first.get("steps") != run.settings.get("steps")
    return False


def _point(workdir: Path) -> Mapping[str, str] | None:
    """Returns the settings of the sweep point in `workdir`; `None` without one."""
    file = workdir.parent / SWEEP
    try:
        return _points(file, file.stat().st_mtime_ns).get(workdir.name)
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=16)
def _points(file: Path, changed: int) -> Mapping[str, Mapping[str, str]]:
    """Returns the points, cached by the time at which the file was `changed`."""
    return points_in(read_json(unlinked(file.parent, file.name)))
