"""The text of a page: what its runs are, and what came of them."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lmlib.metrics.meanings import EVALUATION, VALIDATION
from lmlib.report import curves
from lmlib.report.curves import Measured
from lmlib.report.seen import Seen
from lmlib.runs.goodput import read_starts, total
from lmlib.runs.result import final_numbers
from lmlib.runs.run import difference
from lmlib.terminal.quantities import bytes_text, count_text, duration_text
from lmlib.terminal.text import shown

_SAMPLES = 12  # steps
_LONGEST = 4000  # characters of a text
_FINAL = (
    "training_loss",
    "validation_loss",
    "validation_bits_per_byte",
    "mean_tokens_per_second",
    "mean_mfu",
)
_OF_STEPS = ("loss", "evaluation_loss", "evaluation_bits_per_byte", "tokens_per_second", "mfu")
_OF_TILES = ("parameters", "tokens", "goodput", "peak_memory_bytes")
_TEXTS: Mapping[str, Callable[[float], str]] = {
    **dict.fromkeys(("tokens_per_second", "parameters", "tokens"), count_text),
    **dict.fromkeys(("mfu", "goodput"), "{:.1%}".format),
    "peak_memory_bytes": bytes_text,
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts under a title; `numbers` are the columns that hold numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: str = ""
    numbers: Sequence[int] = ()


def title(runs: Sequence[Seen]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def status(runs: Sequence[Seen]) -> str:
    """How many are in which state, and the step of a single one."""
    if len(runs) > 1:
        counts = collections.Counter(each.state[0] for each in runs)
        others = (f", {count} {state}" for state, count in counts.items() if state != "finished")
        return f"{counts['finished']} of {len(runs)} finished{''.join(others)}"
    (each,) = runs
    if each.run.finished:
        return "finished"
    step, of = _last(each, "step"), each.run.settings.get("steps")
    at = "no step yet" if step is None else f"step {step:,.0f}" + (f" of {of}" if of else "")
    return f"{each.state[0]}, {at}"


def reasons(runs: Sequence[Seen]) -> list[tuple[str, str]]:
    """Why runs are not finished, where they say it."""
    return [
        (f"{each.name}: {status([each])}", _cut(each.state[1])) for each in runs if each.state[1]
    ]


def tiles(each: Seen) -> list[tuple[str, str, str]]:
    """The numbers at the head of one run's page, with their units and what they are over: those of
    the whole run once it has finished, besides those of a step."""
    found = []
    for name in [*_shown_numbers([each]), *_OF_TILES]:
        if (number := each.run.final.get(name)) is not None:
            value, about = number.value, [number.unit, number.over]
        elif (series := each.measurements.series.get(name)) is not None:
            value, about = float(series.values_N[-1]), [f"step {series.steps_N[-1]:,}"]
        else:
            continue
        text = _TEXTS.get(name.removeprefix("mean_"), "{:.4f}".format)(value)
        found.append((name.replace("_", " "), text, shown(", ".join(filter(None, about)))))
    return found


def comparison(runs: Sequence[Seen]) -> list[Table]:
    """What the runs differ in, and what came of each."""
    differing = difference(each.run for each in runs)
    metrics = _shown_numbers(runs)
    header = ["run", *differing, "state", "step", *metrics]
    rows = [
        [
            each.name,
            *("—" if values[i] is None else values[i] for values in differing.values()),
            each.state[0],
            f"{_last(each, 'step') or 0:,.0f}",
            *(number(_value(each, name)) for name in metrics),
        ]
        for i, each in enumerate(runs)
    ]
    text = "the settings that differ, and the numbers of each run"
    shown_rows = [[shown(str(cell)) for cell in row] for row in rows]
    numbers = range(len(differing) + 2, len(header))
    return [Table("Runs", [shown(name) for name in header], shown_rows, text, numbers)]


def verdicts(runs: Sequence[Seen], baseline: str | None, margin: float) -> str:
    """The table of `lmlib.verdicts`. Without a baseline it has means over seeds: nothing if each
    setting has one, or if it cannot be made.

    Raises:
      ValueError: which says why it cannot be made.
    """
    from lmlib.verdicts import compare  # which imports SciPy: a run's own page does without
    from lmlib.verdicts.table import comparison_text

    try:
        found = compare([each.run for each in runs], baseline=baseline, margin=margin)
        if baseline is None and all(len(row.group.runs) == 1 for row in found.rows):
            return ""
        return shown(comparison_text(found))
    except ValueError:
        if baseline is None:
            return ""
        raise


def _shown_numbers(runs: Sequence[Seen]) -> list[str]:
    """Names of `Run.final`, and, of runs that have not finished, of what their last steps have."""
    made = {name for each in runs for name in each.run.final}
    made |= {name for each in runs if not each.run.finished for name in each.measurements.series}
    return [name for name in (*_FINAL, *_OF_STEPS) if name in made]


def _value(each: Seen, name: str) -> float | None:
    found = each.run.final.get(name)
    return _last(each, name) if found is None else found.value


def constants(runs: Sequence[Seen]) -> str:
    found = curves.constants([measured(each) for each in runs])
    if not found:
        return ""
    said = ", ".join(f"{shown(name)} {number(value)}" for name, value in found.items())
    return f"The same in all steps: {said}."


def samples(runs: Sequence[Seen]) -> list[tuple[int, list[tuple[str, str]]]]:
    """The newest steps first, and of each the texts of the runs that have some."""
    steps = sorted({step for each in runs for step in each.run.samples}, reverse=True)
    return [
        (
            step,
            [
                (each.name, _cut(each.run.samples[step]))
                for each in runs
                if step in each.run.samples
            ],
        )
        for step in steps[:_SAMPLES]
    ]


def settings(runs: Sequence[Seen]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Of one run all settings; of several those of the first, for the others differ as said."""
    return [
        (each.name, [(shown(path), shown(value)) for path, value in each.run.settings.items()])
        for each in runs
    ]


def data(runs: Sequence[Seen]) -> dict[str, Any]:
    """What the script of the page draws."""
    numbers = [measured(each) for each in runs]
    return {
        "runs": [{"name": each.name, "group": each.group} for each in runs],
        "charts": curves.charts(numbers, _units(runs)),
        "layers": [
            {"run": run.name if len(runs) > 1 else "", **layers}
            for run in numbers
            for layers in curves.layers(run)
        ],
        "goodput": [row for each in runs for row in _goodput(each)],
    }


def measured(each: Seen) -> Measured:
    """Its numbers, with names that can be shown."""
    series = each.measurements.series
    return Measured(each.name, {shown(name): found for name, found in series.items()})


def _units(runs: Sequence[Seen]) -> dict[str, str]:
    """The units that objectives say, in which results have them."""
    found = {}
    for each in runs:
        finals = final_numbers(each.run.result or {})
        for name in each.measurements.series:
            of = "training_loss" if name == "loss" else name.replace(EVALUATION, VALIDATION, 1)
            if of in finals:
                found[shown(name)] = shown(finals[of].unit)
    return found


def _goodput(each: Seen) -> Iterator[Mapping[str, Any]]:
    starts, _ = read_starts(each.run.path)
    seconds = total(starts).seconds
    whole = sum(seconds.values())
    for order, (phase, spent) in enumerate(seconds.items()):
        if spent > 0:
            yield {
                "run": each.name,
                "part": shown(phase),
                "time": duration_text(spent),
                "share": spent / whole,
                "order": order,
            }


def _last(each: Seen, name: str) -> float | None:
    series = each.measurements.series.get(name)
    return None if series is None else float(series.values_N[-1])


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.5g}"


def _cut(text: str) -> str:
    left = len(text) - _LONGEST
    return shown(text if left <= 0 else f"{text[:_LONGEST]}\n… {left:,} more characters")
