"""The table of runs: settings that differ and results, with a row for each group of seeds."""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lmlib.metrics.meanings import meaning
from lmlib.report.seen import Seen
from lmlib.runs.run import difference
from lmlib.runs.settings import last_name, shortest_names, value_of
from lmlib.terminal.text import shown

_RESULTS = ("validation_loss", "training_loss", "evaluation_loss", "loss")  # in the first column
_BEST: Mapping[str, Callable[..., int]] = {  # metrics of finished runs whose best value is marked
    **dict.fromkeys(("validation_loss", "training_loss", "validation_bits_per_byte"), min),
    **dict.fromkeys(("mean_tokens_per_second", "mean_mfu"), max),
}
_LONGEST = 1e9  # larger numbers have an exponent


class Cell(NamedTuple):
    """A text, its number if it is one, and the standard deviation of a metric over seeds."""

    text: str
    value: float | None = None
    spread: str | None = None


class Column(NamedTuple):
    """A column; `key` is the path of a setting or the name of a metric.

    `cell` returns the cell of several runs, given their places among all runs.
    """

    key: str
    title: str
    unit: str
    is_number: bool
    cell: Callable[[Sequence[int]], Cell]


class Row(NamedTuple):
    """A run, or the means of a group of `size` runs; `best` are the columns of its best results.

    `run` is the place of the run among all runs; `None` for a group.
    """

    name: str
    run: int | None
    size: int
    cells: Sequence[Cell]
    best: Sequence[int] = ()


class RunsTable(NamedTuple):
    """Groups of runs that differ only in seeds. The first of several rows is that of the group."""

    columns: Sequence[Column]
    groups: Sequence[Sequence[Row]]
    has_seeds: bool


def runs_table(runs: Sequence[Seen], metrics: Sequence[str]) -> RunsTable:
    """Returns the table of `runs`; unfinished runs have the latest values of `metrics`."""
    members: dict[str, list[int]] = collections.defaultdict(list)
    for place, each in enumerate(runs):
        members[each.group].append(place)
    result = [name for name in _RESULTS if name in metrics][:1]
    others = [name for name in metrics if name not in result]
    columns = [
        *(_metric(runs, name) for name in result),
        *_settings(runs),
        _texts("state", "state", [each.run.state.name for each in runs]),
        _texts("step", "step", [f"{each.last('step') or 0:,.0f}" for each in runs]),
        *(_metric(runs, name) for name in others),
    ]
    best = list(_best(columns, list(members.values())))
    groups = []
    for group, places in members.items():
        rows = [Row(runs[i].name, i, 1, [each.cell([i]) for each in columns]) for i in places]
        if len(places) > 1:
            rows.insert(0, Row(group, None, len(places), [each.cell(places) for each in columns]))
        rows[0] = rows[0]._replace(best=[i for i, first in best if first == places[0]])
        groups.append(rows)
    return RunsTable(columns, groups, len(groups) < len(runs))


def _settings(runs: Sequence[Seen]) -> Iterator[Column]:
    differing = difference(each.run for each in runs)
    names = shortest_names(differing)
    for path, values in sorted(differing.items(), key=lambda each: last_name(each[0]) == "seed"):
        yield _texts(path, names[path], ["—" if value is None else value for value in values])


def _texts(key: str, title: str, texts: Iterable[str]) -> Column:
    texts = [shown(text) for text in texts]

    def cell(places: Sequence[int]) -> Cell:
        found = list(dict.fromkeys(texts[i] for i in places))
        text = ", ".join(found) if len(found) < 4 else f"{len(found)} values"
        return Cell(text, _number(found[0]) if len(found) == 1 else None)

    whole = all(isinstance(_number(text), int) for text in texts)
    return Column(shown(key), shown(title), "", whole, cell)


def _number(text: str) -> int | float | None:
    value = value_of(text.replace(",", ""))
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _metric(runs: Sequence[Seen], name: str) -> Column:
    finals = [each.run.final.get(name) for each in runs]
    known = meaning(name.removeprefix("mean_"))
    units = [final.unit for final in finals if final is not None and final.unit]
    unit, factor = units[0] if units else known.unit if known else "", 1.0
    if name.endswith("mfu"):
        unit, factor = "%", 100.0
    values = [
        each.last(name) if final is None else final.value
        for each, final in zip(runs, finals, strict=True)
    ]
    sizes = [abs(x * factor) for x in values if x is not None and 0 < abs(x) < math.inf]
    median = float(np.median(sizes)) if sizes else 1.0
    # All numbers of a column have the same decimals, so their digits are aligned.
    digits = 5 if "loss" in name or "bits" in name else 4
    decimals = min(9, max(0, digits - 1 - math.floor(math.log10(median))))

    def text(value: float) -> str:
        return f"{value:,.{decimals}f}" if not abs(value) > _LONGEST else f"{value:.5g}"

    def cell(places: Sequence[int]) -> Cell:
        found = [x * factor for i in places if (x := values[i]) is not None]
        if not found:
            return Cell("", None, "")
        with np.errstate(invalid="ignore", over="ignore"):
            mean = float(np.mean(found))
            spread = float(np.std(found, ddof=1)) if len(found) > 1 else math.nan
        return Cell(text(mean), mean, "" if math.isnan(spread) else f"± {text(spread)}")

    return Column(name, shown(name.replace("_", " ")), shown(unit), True, cell)


def _best(columns: Sequence[Column], groups: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yields a column, and the first run of the group whose mean is the best in it."""
    for i, column in enumerate(columns):
        means = {group[0]: column.cell(group).value for group in groups}
        found = {place: x for place, x in means.items() if x is not None and math.isfinite(x)}
        if column.key in _BEST and len(found) > 1:
            yield i, _BEST[column.key](found, key=found.__getitem__)
