"""A comparison of runs as a text table."""

import math
from collections.abc import Iterator

from lmlib.runs.settings import last_name
from lmlib.terminal.table import columns
from lmlib.verdicts.comparison import Comparison, Judged, Row
from lmlib.verdicts.groups import shown
from lmlib.verdicts.seeds import LEAST_SEEDS, MOST_SEEDS, USUAL_POWER

_COSTS = ("steps", "FLOPs", "seconds")


def comparison_text(comparison: Comparison) -> str:
    """Returns the table, the best group first, and notes about its verdicts."""
    judged = [row.judged for row in comparison.rows if row.judged is not None]
    sped = any(each.speedup is not None for each in judged)
    titles = [*comparison.settings, "seeds", f"{comparison.metric}, {comparison.unit}"]
    titles += ["minus baseline", "verdict"] * bool(judged)
    titles += ["speedup in steps", "in FLOPs", "in seconds"] * sped
    rows = [_cells(comparison, row, sped) for row in comparison.rows]
    # Rows without verdicts lack the verdict cells.
    lines = [columns([titles, *(row[: len(titles)] for row in rows)])]
    lines += ["", "± is one standard error over seeds"]
    if judged:
        lines += ["", *_rules(comparison, len(judged))]
        lines += ["", *_notes(comparison)]
        lines += _about_speedups(judged)
    elif len(comparison.rows) == 1 and comparison.rows[0].is_baseline:
        lines += [
            "",
            "no verdict: all runs have the baseline's settings; give runs of another setting too",
        ]
    elif any(row.is_baseline for row in comparison.rows):
        lines += [
            "",
            "no verdict: each of the others differs from the baseline in more than what --baseline "
            "names; name one run as the baseline of all, or give runs that differ in nothing else",
        ]
    if comparison.left_out:
        lines += ["", *comparison.left_out]
    return "\n".join(lines)


def _cells(comparison: Comparison, row: Row, sped: bool) -> list[str]:
    group, judged = row.group, row.judged
    settings = [shown(group.settings[path]) for path in comparison.settings]
    cells = [*settings, str(len(group.runs)), _estimate(group.mean, group.standard_error)]
    if judged is None:
        return [*cells, "baseline" if row.is_baseline else "has none", *[""] * (1 + 3 * sped)]
    sign, difference = -1 if comparison.highest_is_best else 1, judged.difference
    cells += [_estimate(sign * difference.mean, difference.standard_error, "+"), judged.verdict]
    return cells + [_factor(judged, cost) for cost in _COSTS] * sped


def _rules(comparison: Comparison, count: int) -> Iterator[str]:
    rate = comparison.error_rate
    margin = f" by more than {comparison.margin:g}" if comparison.margin else ""
    yield (
        f"better, worse: one-sided t-tests over seeds{margin}, each wrong of a setting without an "
        f"effect at most {rate:.3g} of the time"
    )
    if count > 1:
        yield (
            f"of {count} settings without any effect one or more would be called better with a "
            f"probability of up to {1 - (1 - rate) ** count:.2g}; --error_rate={rate / count:.2g} "
            f"keeps that below {rate:.3g}"
        )


def _notes(comparison: Comparison) -> Iterator[str]:
    for row in comparison.rows:
        if row.judged is not None:
            name = ", ".join(
                f"{last_name(path)} = {shown(row.group.settings[path])}"
                for path in comparison.settings
            )
            yield f"{name}: {'; '.join(_said(comparison, row.judged))}"


def _said(comparison: Comparison, judged: Judged) -> Iterator[str]:
    difference, unit = judged.difference, comparison.unit
    seeds = difference.seeds
    counted = f"{seeds} {'pair' if difference.paired else 'unpaired run'}{'s' * (seeds != 1)}"
    if not math.isfinite(difference.mean):
        yield f"{counted}, of which one is not finite: nothing can be said"
        return
    if judged.smallest_effect is not None:
        counted += (
            f", which find a difference of {judged.smallest_effect:.2g} {unit} with a power of "
            f"{USUAL_POWER:.0%}"
        )
    yield counted
    if judged.verdict == "inconclusive":
        yield _more_seeds(comparison, judged)
    if judged.text is not None:
        yield (
            f"on other text of this size the difference would be another by about "
            f"{judged.text.of_the_mean:.2g}, of one seed by {judged.text.of_one_seed:.2g}"
        )
        if judged.verdict == "inconclusive" and judged.text.share is not None:
            low, high = judged.text.share
            helps = "these seeds do not show whether more of them or more validation text"
            if high < 0.5 or low > 0.5:
                helps = "more seeds" if high < 0.5 else "more validation text"
            yield (
                f"{low:.0%} to {high:.0%} of the variance between seeds comes of so little text "
                f"(90 % interval): {helps} would help more"
            )


def _more_seeds(comparison: Comparison, judged: Judged) -> str:
    difference = judged.difference
    lacking = LEAST_SEEDS - difference.seeds
    if difference.deviation is None:
        return f"at least {lacking} more seed{'s' * (lacking > 1)} of each: a verdict needs three"
    if difference.deviation == 0:
        return "the seeds differ in nothing, so that nothing says how far off this is"
    if abs(difference.mean) <= comparison.margin:
        return "the difference is within the margin: more seeds would find nothing, if it is so"
    if judged.seeds_needed is None:
        return f"if it is so large, more than {MOST_SEEDS:,} seeds would be needed"
    more = judged.seeds_needed - difference.seeds
    return (
        f"if it is so large, {more} more seed{'s' * (more > 1)} of each would find it with a power "
        f"of {USUAL_POWER:.0%}"
    )


def _about_speedups(judged: list[Judged]) -> Iterator[str]:
    found = [each.speedup for each in judged if each.speedup is not None]
    problems = list(dict.fromkeys(each.speedup_problem for each in judged))
    if found:
        yield ""
        yield (
            "speedup: what the baseline would need for a setting's loss over what the setting "
            "needed; in brackets a 90 % interval"
        )
    if any(each.whole_schedules for each in found):
        yield "read from the fit of E + B/D^β to baseline runs of several lengths"
    if any(not each.whole_schedules for each in found):
        yield (
            "read from the fit of E + B/D^β to the baseline's own validation while it trained: its "
            "learning rate had not decayed by then, so these factors are nearer to 1 than those "
            "between whole runs; baseline runs of four lengths (steps) would tell"
        )
    yield from (f"no speedup: {each}" for each in problems if each is not None)


def _factor(judged: Judged, cost: str) -> str:
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
