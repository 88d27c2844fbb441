"""A comparison of runs as a text table."""

import math
from collections.abc import Iterable, Iterator

from lmlib.runs.settings import shortest_names
from lmlib.terminal.table import columns, wrapped
from lmlib.verdicts.comparison import Comparison, Row, Verdict
from lmlib.verdicts.groups import setting_text
from lmlib.verdicts.seeds import LEAST_SEEDS, MOST_SEEDS, USUAL_POWER

_COSTS = ("steps", "FLOPs", "seconds")
_POWER = f"{100 * USUAL_POWER:g} % power"


def comparison_text(comparison: Comparison) -> str:
    """Returns the table, the best group first, and notes about its verdicts."""
    rows = comparison.rows
    judged = [row.judged for row in rows if row.judged is not None]
    sped = any(each.speedup is not None for each in judged)
    titles = [*comparison.settings, "seeds", f"{comparison.metric}, {comparison.unit}"]
    titles += ["minus baseline", "verdict"] * bool(judged)
    titles += ["speedup in steps", "in FLOPs", "in seconds"] * sped
    # Rows without verdicts lack the verdict cells.
    cells = [_cells(comparison, row, sped)[: len(titles)] for row in rows]
    lines = [columns([titles, *cells]), "", "± is one standard error over seeds."]
    if judged:
        lines += ["", *_rules(comparison, len(judged)), ""]
        noted = [(_name(comparison, row), row.judged) for row in rows if row.judged is not None]
        lines += _merged((name, " ".join(_sentences(comparison, each))) for name, each in noted)
        lines += _about_speedups(judged)
    elif any(row.is_baseline for row in rows):
        why = "all runs have the baseline's settings. Add runs of another setting."
        if len(rows) > 1:
            why = (
                "each other group differs from the baseline in more than --baseline names. Name "
                "one run as the baseline of all, or add runs that differ in nothing else."
            )
        lines += ["", f"No verdict: {why}"]
    if comparison.left_out:
        end = " has not finished: it has no result.json"
        unfinished = [each for each in comparison.left_out if each.endswith(end)]
        lines += ["", *(each for each in comparison.left_out if each not in unfinished[1:])]
        if len(unfinished) > 1:
            names = (each.removeprefix("Left out: ").removesuffix(end) for each in unfinished)
            of_all = f"Left out: {len(unfinished)} runs have not finished: {', '.join(names)}"
            lines[lines.index(unfinished[0])] = of_all
    return wrapped("\n".join(lines))


def _cells(comparison: Comparison, row: Row, sped: bool) -> list[str]:
    group, judged = row.group, row.judged
    settings = [setting_text(group.settings[path]) for path in comparison.settings]
    cells = [*settings, str(len(group.runs)), _estimate(group.mean, group.standard_error)]
    if judged is None:
        return [*cells, "baseline" if row.is_baseline else "no baseline", *[""] * (1 + 3 * sped)]
    sign, difference = -1 if comparison.highest_is_best else 1, judged.difference
    cells += [_estimate(sign * difference.mean, difference.standard_error, "+"), judged.verdict]
    return cells + [_factor(judged, cost) for cost in _COSTS] * sped


def _rules(comparison: Comparison, count: int) -> Iterator[str]:
    rate, margin = comparison.error_rate, comparison.margin
    yield (
        f"Verdicts: one-sided t-tests over seeds{f' beyond the margin {margin:g}' * bool(margin)}. "
        f"A setting with no effect is called better at most {_percent(rate)} of the time, and "
        f"worse at most {_percent(rate)}."
    )
    if count > 1:
        yield (
            f"Chance of any false 'better' among {count} settings: up to "
            f"{_percent(1 - (1 - rate) ** count)}. --error_rate={rate / count:.2g} keeps it below "
            f"{_percent(rate)}."
        )


def _name(comparison: Comparison, row: Row) -> str:
    names, settings = shortest_names(comparison.settings), row.group.settings
    return ", ".join(f"{name} = {setting_text(settings[path])}" for path, name in names.items())


def _merged(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each text of `notes`, pairs of a name and a text, with all its names."""
    names: dict[str, list[str]] = {}
    for name, text in notes:
        names.setdefault(text, []).append(name)
    return [f"{'; '.join(same)}: {text}" for text, same in names.items()]


def _sentences(comparison: Comparison, judged: Verdict) -> Iterator[str]:
    difference, text, seeds = judged.difference, judged.text, judged.difference.seeds
    counted = f"{seeds} {'pair' if difference.paired else 'unpaired run'}{'s' * (seeds != 1)}"
    if not math.isfinite(difference.mean):
        yield f"{counted}; one loss is not finite, so there is no verdict."
        return
    if (effect := judged.smallest_effect) is not None:
        counted += f" detect a difference of {effect:.2g} {comparison.unit} with {_POWER}"
    yield f"{counted}."
    if judged.verdict == "inconclusive":
        yield _more_seeds(comparison, judged)
    if text is None:
        return
    yield (
        f"Standard error from the validation text: {text.of_the_mean:.2g} (of one seed: "
        f"{text.of_one_seed:.2g})."
    )
    if judged.verdict == "inconclusive" and text.share is not None:
        low, high = text.share
        helps = "It is unclear whether more seeds or more text"
        if high < 0.5 or low > 0.5:
            helps = "More seeds" if high < 0.5 else "More validation text"
        yield (
            f"This text causes {100 * low:.0f} to {_percent(high)} of the variance between seeds "
            f"(90 % interval). {helps} would help more."
        )


def _more_seeds(comparison: Comparison, judged: Verdict) -> str:
    difference = judged.difference
    if difference.deviation is None:
        return f"A verdict needs {LEAST_SEEDS} seeds: add {LEAST_SEEDS - difference.seeds} or more."
    if difference.deviation == 0:
        return "All seeds differ equally, so the error of the difference is unknown."
    if abs(difference.mean) <= comparison.margin:
        return "The difference is within the margin; more seeds would hardly change that."
    if judged.seeds_needed is None:
        return f"An effect of this size needs more than {MOST_SEEDS:,} seeds."
    more = judged.seeds_needed - difference.seeds
    return (
        f"An effect of this size needs {more} more seed{'s' * (more > 1)} per setting for {_POWER}."
    )


def _about_speedups(judged: list[Verdict]) -> Iterator[str]:
    found = [each.speedup for each in judged if each.speedup is not None]
    if found:
        yield (
            "\nSpeedup: cost of the baseline for a setting's loss, over the setting's own cost; in "
            "brackets a 90 % interval."
        )
    if any(each.whole_schedules for each in found):
        yield "It comes from a fit of E + B/D^β to baseline runs of several lengths."
    if any(not each.whole_schedules for each in found):
        yield (
            "It comes from a fit of E + B/D^β to the baseline's validation during training. The "
            "learning rate had not decayed by then, so these factors are closer to 1 than those "
            "between whole runs. For a better estimate, train the baseline at four lengths (steps)."
        )
    for each in dict.fromkeys(each.speedup_problem for each in judged if each.speedup_problem):
        yield f"No speedup: {each}"


def _factor(judged: Verdict, cost: str) -> str:
    found, scale = judged.speedup, judged.of_compute.get(cost)
    if found is None or scale is None:
        return "unknown"

    def text(factor: float) -> str:
        words = "over " if factor >= found.most else "under " if factor <= found.least else ""
        return f"{words}{factor * scale:.2f}"

    if cost != "steps" or found.low == found.high:
        return text(found.factor)
    return f"{text(found.factor)} ({text(found.low)} to {text(found.high)})"


def _estimate(value: float, error: float | None, sign: str = "") -> str:
    text = f"{value:{sign}.4f}"
    return text if error is None else f"{text} ± {error:.4f}"


def _percent(rate: float) -> str:
    return f"{100 * rate:.2g} %"
