"""Runs of the same settings but for their seeds, which are one experiment made again."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lmlib.runs.run import difference
from lmlib.runs.settings import is_below, last_name
from lmlib.verdicts.finished import FinishedRun

SEED = "seed"  # the last name of the path of every seed
# What says where and how fast a run goes, how often it is looked at, and on what: which text it was
# measured on, validation.json tells.
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
      settings: those in which groups differ, as text.
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
        """Of the mean, over seeds; `None` of one."""
        count = len(self.runs)
        return float(np.std(self.values, ddof=1)) / math.sqrt(count) if count > 1 else None

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.values).all())


def differing_settings(
    runs: Sequence[FinishedRun], ignored: Iterable[str] = ()
) -> dict[str, tuple[str | None, ...]]:
    """The settings in which runs are other experiments, by path: the text that each run has.

    Args:
      ignored: more settings that make no other experiment, `data.path` say, with all below them.
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
    """The groups of `runs`, and a sentence for each run that is left out, since another one has its
    settings and its seed. `ignored` is that of `differing_settings`.

    Raises:
      ValueError: if no run has a setting that is ignored.
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
    """The settings that tell the groups apart, without those that only vary along with another."""
    seen, found = set(), []
    for path in groups[0].settings if groups else ():
        values = [group.settings[path] for group in groups]
        pattern = tuple(values.index(value) for value in values)
        if pattern not in seen:
            seen.add(pattern)
            found.append(path)
    return found


def shown(setting: str | None) -> str:
    """A setting in a table: of a callable its name without its modules'."""
    if setting is None:
        return "not there"
    found = _CALLABLE.fullmatch(setting)
    return setting if found is None else found[1]


def _seed(settings: Mapping[str, str]) -> Seed:
    seeds = (path for path in settings if _is_seed(path) and not is_below(path, WITHOUT_EFFECT))
    return tuple((path, settings[path]) for path in sorted(seeds))


def _is_seed(path: str) -> bool:
    return last_name(path) == SEED
