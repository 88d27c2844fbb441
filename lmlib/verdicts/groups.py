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

LENGTH = "steps"  # the setting that differs between runs of several lengths
# Settings that don't change the training result: the place and speed of a run, and the frequency
# and text of its measurements. validation.json has a digest of the text.
WITHOUT_EFFECT = (
    *("mesh", "microbatches", "prefetch_batches", "guard.captures"),
    *("compute.attention", "compute.saved", "compute.offloaded", "compute.unroll"),
    *("compute.sequence_parallel", "compute.loss_chunk"),
    *("validation", "evaluation", "checkpoints", "samples", "actions", "sinks"),
)
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*\.(\w+)(?: \(partial\))?")
Seed = tuple[tuple[str, str], ...]  # every seed's path and value


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs of one experiment, by seed; `settings`, as text, are the ones in which groups differ."""

    settings: Mapping[str, str | None]
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

    `ignored` are further settings to ignore, such as `data.path`, with everything below them.
    """
    passed_over = [*WITHOUT_EFFECT, *ignored]
    found = difference(each.run for each in runs).items()
    return {p: x for p, x in found if last_name(p) != "seed" and not is_below(p, passed_over)}


def grouped(
    runs: Sequence[FinishedRun], ignored: Sequence[str] = ()
) -> tuple[list[Group], list[str]]:
    """Groups `runs` by settings, and leaves out repetitions with equal settings and seed.

    Returns the groups, and a message for each run that is left out. Raises ValueError if no run has
    one of the `ignored` settings.
    """
    for name in ignored:
        if not any(is_below(path, [name]) for each in runs for path in each.run.settings):
            raise ValueError(f"--ignore={name}: no run has this setting")
    differing, left_out = differing_settings(runs, ignored), []
    members: dict[tuple[str | None, ...], dict[Seed, FinishedRun]] = {}
    for number, each in enumerate(runs):
        group = members.setdefault(tuple(values[number] for values in differing.values()), {})
        of_run = sorted(each.run.settings.items())
        seeds = (x for x in of_run if last_name(x[0]) == "seed")
        seed = tuple(x for x in seeds if not is_below(x[0], WITHOUT_EFFECT))
        if (first := group.setdefault(seed, each)) is not each:
            left_out.append(
                f"Left out: {each.run.path} has the settings and the seed of {first.run.path}"
            )
    groups = [Group(dict(zip(differing, key, strict=True)), each) for key, each in members.items()]
    return groups, left_out


def distinguishing_settings(groups: Sequence[Group]) -> list[str]:
    """Returns the settings that distinguish groups, and only one of several that vary together."""
    found: dict[tuple[int, ...], str] = {}
    for path in groups[0].settings if groups else ():
        values = [group.settings[path] for group in groups]
        found.setdefault(tuple(values.index(value) for value in values), path)
    return list(found.values())


def setting_text(setting: str | None) -> str:
    """Formats a setting for a table: a callable becomes its name without modules."""
    if setting is None:
        return "(absent)"
    found = _CALLABLE.fullmatch(setting)
    return setting if found is None else found[1]


def baselines(groups: Sequence[Group], named: str) -> dict[int, int]:
    """Maps the index of each group to the index of its baseline; groups without one are left out.

    `named` is a run, by its workdir or its name, whose group is the baseline of all; or settings
    such as `optimizer.peak_lr=0.001,steps=100`. The baseline of a group then has these settings and
    otherwise the group's own, except below a named one (`optimizer.peak_lr` if `optimizer` is
    named). Raises ValueError if no group matches, or several match for one group.
    """
    of_run = {
        number
        for number, group in enumerate(groups)
        for each in group.runs.values()
        if named == each.run.name or Path(named) == each.run.path
    }
    if len(of_run) > 1:
        raise ValueError(f"--baseline={named} names several runs: give the whole path of one")
    if of_run:
        return dict.fromkeys(range(len(groups)), of_run.pop())
    wanted = _settings(named, groups)
    chosen = [
        i
        for i, group in enumerate(groups)
        if all(_same(group.settings[path], text) for path, text in wanted.items())
    ]
    if not chosen:
        raise ValueError(f"--baseline={named}: no finished run has these settings")
    found = {}
    for number, group in enumerate(groups):
        rest = {path: text for path, text in group.settings.items() if not is_below(path, wanted)}
        alike = [i for i in chosen if rest.items() <= dict(groups[i].settings).items()]
        if len(alike) > 1:
            differing = group.settings.keys() - rest.keys() - wanted.keys()
            raise ValueError(
                f"--baseline={named} matches {len(alike)} groups: also name one of "
                f"{', '.join(sorted(differing))}"
            )
        if alike:
            found[number] = alike[0]
    return found


def lengths(groups: Sequence[Group], baseline: Group) -> list[Group]:
    """Returns the groups that differ from `baseline` only in their length, including itself."""
    rest = {path: text for path, text in baseline.settings.items() if path != LENGTH}
    return [group for group in groups if rest.items() <= dict(group.settings).items()]


def _settings(named: str, groups: Sequence[Group]) -> dict[str, str]:
    """Parses PATH=VALUE,PATH=VALUE; a path may be shortened to a unique ending."""
    wanted, differing = {}, list(groups[0].settings)
    for part in split(named, ","):
        path, *texts = split(part, "=")
        if not texts:
            names = sorted(each.run.name for group in groups for each in group.runs.values())
            raise ValueError(
                f"--baseline={named} is not a finished run ({', '.join(names[:5])}"
                f"{', …' * (len(names) > 5)}); give one, or settings as in optimizer.peak_lr=0.001"
            )
        ending = [each for each in differing if each.endswith(f".{path}")]
        if path not in differing and len(ending) != 1:
            raise ValueError(
                f"--baseline: {path!r} is {'the end of several' if ending else 'none'} of the "
                f"settings in which the runs differ: {', '.join(differing) or 'there are none'}; "
                "a run's workdir names its group too"
            )
        wanted[path if path in differing else ending[0]] = "=".join(texts)
    return wanted


def _same(text: str | None, wanted: str) -> bool:
    """True if a setting equals the wanted text: 1e-3 equals 0.001, and quotes are optional."""
    if wanted in (setting_text(text), text, str(value_of(text or ""))):
        return True
    try:
        return float(text or "") == float(wanted)
    except ValueError:
        return False
