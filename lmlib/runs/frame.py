"""Runs as a table of pandas, for plots and statistics of one's own."""

import math
import os
from typing import TYPE_CHECKING, Any

from lmlib.runs.run import difference, find_runs
from lmlib.runs.settings import value_of

if TYPE_CHECKING:
    import pandas


def runs(*places: str | os.PathLike[str], steps: bool = False) -> "pandas.DataFrame":
    """A row for each run in `places`: workdirs, or folders that hold some, such as a sweep's.

    Columns are `run` (its workdir), the settings in which the runs differ (`None` where that is the
    setting, NaN where a run has none), its `state`, whether it has `finished`, the last value of
    each metric, such as `loss` and `evaluation_loss`, and the numbers in `Run.final`, such as
    `training_loss` and `validation_loss`. With `steps`, a row for each step of each run, and that
    step's metrics.

    Raises:
      ValueError: naming a place that has no run.
    """
    # Slow to import, and a thread of pyarrow's would take an arena of malloc from those that train.
    import pandas

    found = find_runs(places)
    differing = difference(found)
    rows: list[dict[str, Any]] = []
    for number, run in enumerate(found):
        texts = {path: values[number] for path, values in differing.items()}
        settings = {path: value_of(text) for path, text in texts.items() if text is not None}
        begin = {"run": str(run.path), **settings}
        if steps:
            rows += [{**begin, **line} for line in run.metrics]
        else:
            last = {name: value for line in run.metrics for name, value in line.items()}
            final = {name: each.value for name, each in run.final.items()}
            state = {"state": run.state.name, "finished": run.finished}
            rows.append({**begin, **state, **last, **final})
    table = pandas.DataFrame(rows)
    for path in differing:
        values = [row.get(path, math.nan) for row in rows]
        if None in values:  # which pandas would take for a missing number
            table[path] = pandas.Series(values, dtype=object)
    return table
