"""Runs as a table of pandas, for plots and statistics of one's own."""

import os
from typing import TYPE_CHECKING, Any

from lmlib.runs.run import Run, difference, find_runs

if TYPE_CHECKING:
    import pandas


def runs(*places: str | os.PathLike[str], steps: bool = False) -> "pandas.DataFrame":
    """A row for each run in `places`: workdirs, or folders that hold some, such as a sweep's.

    Columns are `run` (its workdir), the settings in which the runs differ, whether it has
    `finished`, and each metric's last value. With `steps`, a row for each step of each run, and
    that step's metrics.

    Raises:
      ValueError: naming a place that has no run.
    """
    # Slow to import, and a thread of pyarrow's would take an arena of malloc from those that train.
    import pandas

    found = find_runs(places)
    differing = difference(found)
    rows: list[dict[str, Any]] = []
    for number, run in enumerate(found):
        settings = {path: _value(values[number]) for path, values in differing.items()}
        begin = {"run": str(run.path), **settings}
        if steps:
            rows += [{**begin, **line} for line in run.metrics]
        else:
            rows.append({**begin, "finished": run.finished, **_last_values(run)})
    return pandas.DataFrame(rows)


def _last_values(run: Run) -> dict[str, Any]:
    return {name: value for line in run.metrics for name, value in line.items()}


def _value(text: str | None) -> Any:
    """A number or a truth value where the text is one."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            continue
    return text
