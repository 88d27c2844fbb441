"""Runs in a terminal: the latest numbers of each run, and sparklines of their curves."""

from collections.abc import Sequence

import numpy as np

from lmlib.report import curves, tables
from lmlib.report.points import downsample, steps_per_point
from lmlib.report.seen import Seen
from lmlib.runs.series import Series
from lmlib.terminal.table import columns
from lmlib.terminal.text import shown

_BARS = "▁▂▃▄▅▆▇█"
_NARROWEST = 10
_OF_SEVERAL = 3  # the first metrics of each run


def view(runs: Sequence[Seen], width: int) -> str:
    """Returns lines of at most about `width` characters."""
    texts = []
    for each in runs:
        finals = (shown(f"{name} {tables.number(of.value)}") for name, of in each.run.final.items())
        head = "  ".join([each.name, tables.status([each]), *finals])
        reason = each.run.state.reason.splitlines()[:1]
        names = curves.drawn([each])[: None if len(runs) == 1 else _OF_SEVERAL]
        left = max(_NARROWEST, width - max(map(len, names), default=0) - 3 * 13)
        rows: list[tuple[str, ...]] = [("metric", "last", "min", "max", "")]
        for name in names:
            values_N = each.series[name].values_N
            finite_N = values_N[np.isfinite(values_N)]
            ends = (finite_N.min(), finite_N.max()) if len(finite_N) else (None, None)
            numbers = map(tables.number, (values_N[-1], *ends))
            rows.append((name, *numbers, bars(each.series[name], left)))
        texts.append("\n".join([head, *reason, columns(rows, width)]))
    return "\n\n".join(texts)


def bars(series: Series, most: int) -> str:
    """Returns a sparkline: one character per stretch of steps, at most `most`.

    A character shows the mean between the smallest, ▁, and the largest, █; × if nothing is finite.
    """
    mean_P = downsample(series, steps_per_point(series, most)).mean_P
    finite_P = mean_P[np.isfinite(mean_P)]
    least = finite_P.min(initial=np.inf)
    heights_P = (mean_P - least) / ((finite_P - least).max(initial=0) or 1.0) * len(_BARS)
    return "".join("×" if np.isnan(x) else _BARS[min(len(_BARS) - 1, int(x))] for x in heights_P)
