"""Which group is the baseline of which other one."""

from collections.abc import Sequence
from pathlib import Path

from lmlib.runs.settings import is_below, split, value_of
from lmlib.verdicts.groups import Group, Settings, shown

LENGTH = "steps"  # the setting in which runs of one ladder of lengths differ


def baselines(groups: Sequence[Group], named: str) -> dict[int, int]:
    """For the number of each group, that of its baseline; without those that have none.

    Args:
      named: a run, by its workdir or its name, whose group is the baseline of all; or settings,
        `optimizer.peak_lr=0.001,steps=100` or `peak_lr=1e-3,steps=100`: the baseline of a group
        then has these, and all others as the group has them, so that each size of a sweep is
        compared with its own. Settings of what is named, as `optimizer.peak_lr` is of `optimizer`,
        may be others.

    Raises:
      ValueError: if nothing is so named, or several for one group.
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
    """The groups that differ from `baseline` in nothing but their length, itself among them."""
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
    """`path`, or the only path that ends with it."""
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
    """1e-3 is 0.001, quotes may be left out, and a callable is named as in a table."""
    if wanted in (shown(text), text, str(value_of(text or ""))):
        return True
    try:
        return float(text or "") == float(wanted)
    except ValueError:
        return False
