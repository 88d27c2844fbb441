"""The text of a page: the runs, their states and their numbers."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmlib.metrics.meanings import EVALUATION, VALIDATION
from lmlib.report import curves
from lmlib.report.seen import Seen
from lmlib.runs.goodput import FINISHED, read_starts, total
from lmlib.runs.result import final_numbers
from lmlib.runs.run import difference
from lmlib.terminal.quantities import bytes_text, count_text, duration_text
from lmlib.terminal.text import shown

_SAMPLES = 12  # steps
_LONGEST = 4000  # characters per text
_NUMBERS = (  # of whole runs, then of the last steps of unfinished runs
    *("training_loss", "validation_loss", "validation_bits_per_byte"),
    *("mean_tokens_per_second", "mean_mfu"),
    *("loss", "evaluation_loss", "evaluation_bits_per_byte", "tokens_per_second", "mfu"),
)
_OF_TILES = ("parameters", "tokens", "goodput", "peak_memory_bytes")
_TEXTS: Mapping[str, Callable[[float], str]] = {
    **dict.fromkeys(("tokens_per_second", "parameters", "tokens"), count_text),
    **dict.fromkeys(("mfu", "goodput"), "{:.1%}".format),
    "peak_memory_bytes": bytes_text,
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

    A finished run shows the numbers of the whole run, others those of a step.
    """
    found = []
    for name in [*_shown_numbers([each]), *_OF_TILES]:
        if (final := each.run.final.get(name)) is not None:
            value, about = final.value, [final.unit, final.over]
        elif (series := each.series.get(name)) is not None:
            value, about = float(series.values_N[-1]), [f"step {series.steps_N[-1]:,}"]
        else:
            continue
        text = _TEXTS.get(name.removeprefix("mean_"), "{:.4f}".format)(value)
        found.append((name.replace("_", " "), text, shown(", ".join(filter(None, about)))))
    return found


def comparison(runs: Sequence[Seen]) -> Table:
    """Returns a table of the settings in which the runs differ, and the numbers of each run."""
    differing, metrics = difference(each.run for each in runs), _shown_numbers(runs)
    rows = [["run", *differing, "state", "step", *metrics]]
    for i, each in enumerate(runs):
        settings = ["—" if values[i] is None else str(values[i]) for values in differing.values()]
        final, step = each.run.final, f"{each.last('step') or 0:,.0f}"
        numbers = [final[name].value if name in final else each.last(name) for name in metrics]
        rows.append([each.name, *settings, each.run.state.name, step, *map(number, numbers)])
    header, *texts = [[shown(cell) for cell in row] for row in rows]
    return Table(header, texts, range(len(differing) + 2, len(header)))


def verdicts(runs: Sequence[Seen], baseline: str | None, margin: float) -> str:
    """Returns the table of `lmlib.verdicts`; raises ValueError if the baseline does not fit.

    Without a baseline it has means over seeds, or is empty if there are none.
    """
    from lmlib.verdicts import compare  # imports SciPy, which the page of one run does not need
    from lmlib.verdicts.table import comparison_text

    try:
        found = compare([each.run for each in runs], baseline=baseline, margin=margin)
    except ValueError:
        if baseline is None:
            return ""
        raise
    if baseline is None and all(len(row.group.runs) == 1 for row in found.rows):
        return ""
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
    """Returns the settings of each run; first, once, those that several runs all have."""
    every = [[(shown(a), shown(b)) for a, b in each.run.settings.items()] for each in runs]
    common = set(every[0]).intersection(*every) if len(runs) > 1 else set()
    found = [("all runs", [pair for pair in every[0] if pair in common])] if common else []
    own = ([pair for pair in pairs if pair not in common] for pairs in every)
    return found + [(each.name, pairs) for each, pairs in zip(runs, own, strict=True) if pairs]


def data(runs: Sequence[Seen]) -> dict[str, Any]:
    """Returns the data that the page's script draws."""
    units = {}  # of objectives, from result.json
    for each in runs:
        finals = final_numbers(each.run.result or {})
        for name in each.series:
            of = "training_loss" if name == "loss" else name.replace(EVALUATION, VALIDATION, 1)
            if of in finals:
                units[name] = shown(finals[of].unit)
    charts = curves.charts(runs, units)
    return {
        "runs": [{"name": each.name, "group": each.group} for each in runs],
        "axes": curves.shared(charts),
        "charts": charts,
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


def _shown_numbers(runs: Sequence[Seen]) -> list[str]:
    """Returns the names in `Run.final`, and the last steps' metrics of unfinished runs."""
    made = {name for each in runs for name in each.run.final}
    made |= {name for each in runs if not each.run.finished for name in each.series}
    return [name for name in _NUMBERS if name in made]


def _goodput(each: Seen) -> Iterator[Mapping[str, Any]]:
    seconds = total(read_starts(each.run.path)[0]).seconds
    for order, (phase, spent) in enumerate(seconds.items()):
        if spent > 0:
            row = {"run": each.name, "part": shown(phase), "time": duration_text(spent)}
            yield {**row, "share": spent / sum(seconds.values()), "order": order}


def _cut(text: str) -> str:
    left = len(text) - _LONGEST
    return shown(text if left <= 0 else f"{text[:_LONGEST]}\n… {left:,} more characters")
