"""Runs in a terminal: the last numbers of each, and how they came about in a line of bars."""

from collections.abc import Iterator, Sequence

import numpy as np

from lmlib.report import curves, tables
from lmlib.report.seen import Seen
from lmlib.report.thinning import stretch, thinned
from lmlib.runs.series import Series
from lmlib.terminal.table import columns
from lmlib.terminal.text import shown

_BARS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"
_NARROWEST = 10
_OF_SEVERAL = 3  # metrics of each run, the first


def view(runs: Sequence[Seen], width: int) -> str:
    """Lines of at most about `width` characters."""
    return "\n\n".join(
        "\n".join(
            [_head(each), *each.state[1].splitlines()[:1], columns([*_rows(each, width, runs)])]
        )
        for each in runs
    )


def _head(each: Seen) -> str:
    finals = (f"{name} {tables.number(of.value)}" for name, of in each.run.final.items())
    return "  ".join([each.name, tables.status([each]), *map(shown, finals)])


def _rows(each: Seen, width: int, runs: Sequence[Seen]) -> Iterator[tuple[str, ...]]:
    names = curves.drawn([tables.measured(each)])
    names = names if len(runs) == 1 else names[:_OF_SEVERAL]
    found = tables.measured(each).series
    longest = max(map(len, names), default=0)
    left = max(_NARROWEST, width - longest - 3 * 13)
    yield "metric", "last", "least", "greatest", ""
    for name in names:
        finite_N = found[name].values_N[np.isfinite(found[name].values_N)]
        ends = (float(finite_N.min()), float(finite_N.max())) if len(finite_N) else (None, None)
        numbers = (float(found[name].values_N[-1]), *ends)
        yield shown(name), *map(tables.number, numbers), bars(found[name], left)


def bars(series: Series, most: int) -> str:
    """A character for each stretch of steps, at most `most`: its mean between the least, ▁, and
    the greatest, █; × if nothing in it is finite."""
    mean_P = thinned(series, stretch(series, most)).mean_P
    finite_P = mean_P[np.isfinite(mean_P)]
    if not len(finite_P):
        return _NOT_FINITE * len(mean_P)
    least, span = finite_P.min(), np.ptp(finite_P) or 1.0
    return "".join(
        _BARS[min(len(_BARS) - 1, int((mean - least) / span * len(_BARS)))]
        if np.isfinite(mean)
        else _NOT_FINITE
        for mean in mean_P
    )
