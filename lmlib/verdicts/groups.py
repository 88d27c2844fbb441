"""Groups of runs that differ only in seeds, and the baseline of each group."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lmlib.runs.run import difference
from lmlib.runs.settings import is_below, last_name, split, value_of
from lmlib.verdicts.finished import FinishedRun

SEED = "seed"  # last component of every seed's path
LENGTH = "steps"  # the setting that differs between runs of several lengths
# Settings that don't change the training result: the place and speed of a run, and the frequency
# and text of its measurements. validation.json has a digest of the text.
WITHOUT_EFFECT = (
    "mesh",
    "compute.attention",
    "compute.saved",
    "compute.offloaded",
    "compute.unroll",
    "compute.sequence_parallel",
    "compute.loss_chunk",
    "microbatches",
    "average",
    "guard.captures",
    "validation",
    "evaluation",
    "checkpoints",
    "samples",
    "actions",
    "sinks",
    "prefetch_batches",
)

_CALLABLE = re.compile(r"[A-Za-z_][\w.]*\.(\w+)(?: \(partial\))?")

Seed = tuple[tuple[str, str], ...]  # every seed's path and value
Settings = Mapping[str, str | None]


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one experiment.

    Args:
      settings: the settings in which groups differ, as text.
      runs: by seed.
    """

    settings: Settings
    runs: Mapping[Seed, FinishedRun]

    @property
    def values(self) -> np.ndarray:
        """The metric of each run."""
        return np.array([run.value for run in self.runs.values()])

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def standard_error(self) -> float | None:
        """The standard error of the mean over seeds; `None` for a single seed."""
        count = len(self.runs)
        return float(np.std(self.values, ddof=1)) / math.sqrt(count) if count > 1 else None

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.values).all())


def differing_settings(
    runs: Sequence[FinishedRun], ignored: Iterable[str] = ()
) -> dict[str, tuple[str | None, ...]]:
    """Returns the settings that distinguish experiments: the text of each run, by path.

    Args:
      ignored: further settings to ignore, such as `data.path`, with everything below them.
    """
    passed_over = [*WITHOUT_EFFECT, *ignored]
    return {
        path: values
        for path, values in difference(each.run for each in runs).items()
        if not _is_seed(path) and not is_below(path, passed_over)
    }


def grouped(
    runs: Sequence[FinishedRun], ignored: Sequence[str] = ()
) -> tuple[list[Group], list[str]]:
    """Groups `runs` by settings; returns the groups, and a message for each run that is left out.

    A run is left out if an earlier one has the same settings and seed.

    Args:
      ignored: as in `differing_settings`.

    Raises:
      ValueError: if no run has one of the ignored settings.
    """
    for name in ignored:
        if not any(is_below(path, [name]) for each in runs for path in each.run.settings):
            raise ValueError(f"no run has the setting {name!r}, which is to be ignored")
    differing = differing_settings(runs, ignored)
    members: dict[tuple[str | None, ...], dict[Seed, FinishedRun]] = {}
    left_out = []
    for number, each in enumerate(runs):
        key = tuple(values[number] for values in differing.values())
        group = members.setdefault(key, {})
        if (first := group.setdefault(_seed(each.run.settings), each)) is not each:
            left_out.append(
                f"{each.run.path} has the settings and the seed of {first.run.path}: left out"
            )
    groups = [Group(dict(zip(differing, key, strict=True)), each) for key, each in members.items()]
    return groups, left_out


def telling(groups: Sequence[Group]) -> list[str]:
    """Returns the settings that distinguish the groups.

    Only the first of several settings that vary together is included.
    """
    seen, found = set(), []
    for path in groups[0].settings if groups else ():
        values = [group.settings[path] for group in groups]
        pattern = tuple(values.index(value) for value in values)
        if pattern not in seen:
            seen.add(pattern)
            found.append(path)
    return found


def shown(setting: str | None) -> str:
    """Formats a setting for a table: a callable becomes its name without modules."""
    if setting is None:
        return "not there"
    found = _CALLABLE.fullmatch(setting)
    return setting if found is None else found[1]


def baselines(groups: Sequence[Group], named: str) -> dict[int, int]:
    """Maps the index of each group to the index of its baseline; groups without one are left out.

    Args:
      named: a run, by its workdir or its name, whose group is the baseline of all; or settings such
        as `optimizer.peak_lr=0.001,steps=100` or `peak_lr=1e-3,steps=100`. The baseline of a group
        then has these settings and otherwise the group's own, so that each size of a sweep is
        compared with a baseline of the same size. Settings below a named one may differ, as
        `optimizer.peak_lr` if `optimizer` is named.

    Raises:
      ValueError: if no group matches, or several match for one group.
    """
    of_run = [
        number
        for number, group in enumerate(groups)
        for each in group.runs.values()
        if named == each.run.name or Path(named) == each.run.path
    ]
    if len(set(of_run)) > 1:
        raise ValueError(f"several runs are called {named!r}: give the baseline's whole path")
    if of_run:
        return dict.fromkeys(range(len(groups)), of_run[0])
    wanted = _settings(named, groups)
    chosen = [i for i, group in enumerate(groups) if _has(group.settings, wanted)]
    if not chosen:
        raise ValueError(f"no finished run has the baseline's settings, {named}")
    found = {}
    for number, group in enumerate(groups):
        rest = {path: text for path, text in group.settings.items() if not is_below(path, wanted)}
        alike = [i for i in chosen if rest.items() <= dict(groups[i].settings).items()]
        if len(alike) > 1:
            differing = [path for path in group.settings if is_below(path, wanted)]
            raise ValueError(
                f"the baseline {named} is {len(alike)} settings: name one more of "
                f"{', '.join(path for path in differing if path not in wanted)}"
            )
        if alike:
            found[number] = alike[0]
    return found


def ladder(groups: Sequence[Group], baseline: Group) -> list[Group]:
    """Returns the groups that differ from `baseline` only in their length, including itself."""
    rest = {path: text for path, text in baseline.settings.items() if path != LENGTH}
    return [group for group in groups if rest.items() <= dict(group.settings).items()]


def _settings(named: str, groups: Sequence[Group]) -> dict[str, str]:
    wanted = {}
    for part in split(named, ","):
        path, *texts = split(part, "=")
        if not texts:
            names = sorted(each.run.name for group in groups for each in group.runs.values())
            raise ValueError(
                f"the baseline {named!r} is none of the finished runs ({', '.join(names[:5])}"
                f"{', …' * (len(names) > 5)}), and no setting such as optimizer.peak_lr=0.001"
            )
        wanted[_whole_path(path, list(groups[0].settings))] = "=".join(texts)
    return wanted


def _whole_path(path: str, differing: list[str]) -> str:
    """Returns `path`, or the only path that ends with it."""
    ending = [each for each in differing if each == path or each.endswith(f".{path}")]
    if path in ending or len(ending) == 1:
        return path if path in ending else ending[0]
    raise ValueError(
        f"the baseline is named by {path!r}, which is "
        f"{'the end of several' if ending else 'none'} of the settings in which the runs differ: "
        f"{', '.join(differing) or 'there are none'}"
    )


def _has(settings: Settings, wanted: dict[str, str]) -> bool:
    return all(_same(settings[path], text) for path, text in wanted.items())


def _same(text: str | None, wanted: str) -> bool:
    """True if a setting equals the wanted text.

    1e-3 equals 0.001, quotes are optional, and a callable is named as in a table.
    """
    if wanted in (shown(text), text, str(value_of(text or ""))):
        return True
    try:
        return float(text or "") == float(wanted)
    except ValueError:
        return False


def _seed(settings: Mapping[str, str]) -> Seed:
    seeds = (path for path in settings if _is_seed(path) and not is_below(path, WITHOUT_EFFECT))
    return tuple((path, settings[path]) for path in sorted(seeds))


def _is_seed(path: str) -> bool:
    return last_name(path) == SEED
