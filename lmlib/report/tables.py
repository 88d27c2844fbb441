"""The text of a page: the runs, their states and their numbers."""

import collections
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmlib.report import curves
from lmlib.report.seen import Seen
from lmlib.runs.goodput import FINISHED, RUNNING, seconds_left, total
from lmlib.terminal.quantities import bytes_text, count_text, duration_text, mean_text
from lmlib.terminal.text import shown

_SAMPLES = 12  # steps
_LONGEST = 4000  # characters per text
# For whole runs, and for the last steps of unfinished runs.
_LOSSES = ("training_loss", "validation_loss", "loss", "evaluation_loss")
_NUMBERS = (
    *("validation_bits_per_byte", "evaluation_bits_per_byte"),
    *("mean_tokens_per_second", "mean_mfu", "tokens_per_second", "mfu"),
)
_OF_TILES = (
    *("parameters", "tokens", "goodput", "process_memory_bytes", "device_memory_bytes"),
    "peak_memory_bytes",
)
_TEXTS: Mapping[str, Callable[[float], str]] = {
    **dict.fromkeys(("tokens_per_second", "parameters", "tokens"), count_text),
    **dict.fromkeys(("mfu", "goodput"), "{:.1%}".format),
    **dict.fromkeys(_OF_TILES[3:], bytes_text),
}


class Table(NamedTuple):
    """Rows of texts; `numbers` are the columns that hold numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[int]


def status(runs: Sequence[Seen]) -> str:
    """Returns the number of runs in each state, and the step of a single one."""
    if len(runs) == 1:
        return shown(runs[0].run.status(runs[0].last("step")))
    counts = collections.Counter(each.run.state.name for each in runs)
    others = (f", {count} {state}" for state, count in counts.items() if state != FINISHED)
    return f"{counts[FINISHED]} of {len(runs)} finished{''.join(others)}"


def reasons(runs: Sequence[Seen]) -> list[tuple[str, str]]:
    """Returns the recorded reasons why runs did not finish, with the runs that share each."""
    same: dict[tuple[str, str], list[Seen]] = collections.defaultdict(list)
    for each in runs:
        if (why := each.run.state.reason) != "":
            same[each.run.state.name, why].append(each)
    found = []
    for (state, why), those in same.items():
        ended = status(those) if len(those) == 1 else state
        found.append((f"{', '.join(each.name for each in those)}: {ended}", _cut(why)))
    return found


def tiles(each: Seen) -> list[tuple[str, str, str]]:
    """Returns the numbers at the head of one run's page, with their units and steps.

    A finished run shows numbers of the whole run, other runs numbers of a step.
    """
    return [*_tiles(each, shown_numbers([each])), *_times(each), *_tiles(each, _OF_TILES)]


def _tiles(each: Seen, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for name in names:
        if (final := each.run.final.get(name)) is not None:
            value, unit, about = final
        elif (series := each.series.get(name)) is not None:
            value, unit = float(series.values_N[-1]), each.meaning(name).unit
            about = f"step {series.steps_N[-1]:,}"
        elif name == "parameters" and each.run.about.parameters is not None:
            value, unit, about = each.run.about.parameters, "", ""
        else:
            continue
        text = _TEXTS.get(name.removeprefix("mean_"))
        unit, digits = ("", text(value)) if text else (unit, mean_text(value, unit))
        yield each.named(name), digits, shown(", ".join(filter(None, (unit, about))))


def _times(each: Seen) -> Iterator[tuple[str, str, str]]:
    """Yields the wall time so far, and the time left of a running run, as tiles."""
    if not each.run.starts:
        return
    *_, newest = starts = each.run.starts
    running, now = each.run.state.name == RUNNING, time.time()
    wall = sum(total(starts).seconds.values()) + (max(0.0, now - newest.until) if running else 0.0)
    count = "1 start" if len(starts) == 1 else f"{len(starts)} starts"
    yield "elapsed" if running else "wall time", duration_text(wall), f"in {count}"
    steps, first = each.run.settings.get("steps", ""), each.run.about.first_step
    if running and first is not None and steps.isdecimal():
        left = seconds_left(newest, first, int(steps[:18]), now)
        if left is not None:
            yield "left", duration_text(left), "at the pace of this start"


def verdicts(runs: Sequence[Seen], baseline: str, margin: float) -> str:
    """Returns the table of `lmlib.verdicts`; raises ValueError if the baseline does not fit."""
    from lmlib.verdicts import compare  # imports SciPy, which other pages do not need
    from lmlib.verdicts.table import comparison_text

    found = compare([each.run for each in runs], baseline=baseline, margin=margin)
    return shown(comparison_text(found))


def constants(runs: Sequence[Seen]) -> str:
    found = [f"{name} {number(value)}" for name, value in curves.constants(runs).items()]
    return f"Constant so far: {', '.join(found)}." * bool(found)


def samples(runs: Sequence[Seen]) -> list[tuple[int, list[tuple[str, str]]]]:
    """Returns the newest steps first, each with the sampled texts of the runs that have some."""
    of_step: dict[int, list[tuple[str, str]]] = collections.defaultdict(list)
    for each in runs:
        for step, text in each.run.samples.items():
            of_step[step].append((each.name, _cut(text)))
    return sorted(of_step.items(), reverse=True)[:_SAMPLES]


def settings(runs: Sequence[Seen]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns the settings of each run; settings that all runs share come first, once."""
    every = [[(shown(a), shown(b)) for a, b in each.run.settings.items()] for each in runs]
    common = set(every[0]).intersection(*every) if len(runs) > 1 else set()
    found = [("all runs", [pair for pair in every[0] if pair in common])] if common else []
    own = ([pair for pair in pairs if pair not in common] for pairs in every)
    return found + [(each.name, pairs) for each, pairs in zip(runs, own, strict=True) if pairs]


def data(runs: Sequence[Seen]) -> dict[str, Any]:
    """Returns the data that the page's script draws."""
    return {
        "runs": [{"name": each.name, "group": each.group} for each in runs],
        "charts": curves.charts(runs),
        "layers": [
            {"run": run.name if len(runs) > 1 else "", **layers}
            for run in runs
            for layers in curves.layers(run)
        ],
        "goodput": [row for each in runs for row in _goodput(each)],
    }


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.5g}"


def shown_numbers(runs: Sequence[Seen]) -> list[str]:
    """Returns the names in `Run.final`, and the last steps' metrics of unfinished runs."""
    made = {name for each in runs for name in each.run.final}
    made |= {name for each in runs if not each.run.finished for name in each.series}
    own = dict.fromkeys(shown(name) for each in runs for name in each.run.about.metrics)
    others = [
        next((x for x in (f"validation_{name}", f"training_{name}") if x in made), name)
        for name in own
        if name != "loss"
    ]
    return [name for name in (*_LOSSES, *others, *_NUMBERS) if name in made]


def wall_times(runs: Sequence[Seen]) -> Table | None:
    """Returns the time that the runs spent in each phase, with its share; `None` without times.

    One run has a row for each phase, several have a column.
    """
    spent = {
        each.name: {row["part"]: (row["time"], f"{row['share']:.1%}") for row in _goodput(each)}
        for each in runs
    }
    phases = list(dict.fromkeys(phase for times in spent.values() for phase in times))
    if not phases:
        return None
    if len(runs) == 1:
        rows = [(phase, *texts) for phase, texts in spent[runs[0].name].items()]
        return Table(("phase", "time", "share"), rows, (1, 2))
    table = []
    for each in runs:
        wall = sum(total(each.run.starts).seconds.values())
        cells = (" · ".join(spent[each.name].get(phase, ())) for phase in phases)
        table.append((each.name, duration_text(wall) if wall else "", *cells))
    return Table(("run", "wall time", *phases), table, range(1, 2 + len(phases)))


def _goodput(each: Seen) -> Iterator[Mapping[str, Any]]:
    seconds = total(each.run.starts).seconds
    for order, (phase, spent) in enumerate(seconds.items()):
        if spent > 0:
            row = {"run": each.name, "part": shown(phase), "time": duration_text(spent)}
            yield {**row, "share": spent / sum(seconds.values()), "order": order}


def _cut(text: str) -> str:
    left = len(text) - _LONGEST
    return shown(text if left <= 0 else f"{text[:_LONGEST]}\n… {left:,} more characters")
