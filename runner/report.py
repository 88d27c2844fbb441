"""Makes a page about one or more runs: curves, samples, settings, goodput.

    python -m runner.report WORKDIR
    python -m runner.report SWEEP --to=page.html
    python -m runner.report RUN RUN --pictures=FOLDER --metrics=loss --against=tokens

Arguments are workdirs, or folders that contain workdirs, such as a sweep's. The page is a single
file that works offline: report.html in the workdir, or in the folder of the runs. See
docs/pictures.md.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from lmlib.report import seen, write_page, write_pictures
from lmlib.report.page import FILE_NAME
from lmlib.report.points import AXES
from runner.command_line.command import run
from runner.command_line.exit_status import FINISHED
from runner.command_line.paths import check_can_be_made
from runner.errors import ConfigError, user_errors

_TO = flags.DEFINE_string("to", None, "File for the page.")
_BASELINE = flags.DEFINE_string("baseline", None, "Baseline for verdicts, as in runner.compare.")
_MARGIN = flags.DEFINE_float(
    "margin", None, "Margin for verdicts, as in runner.compare.", lower_bound=0.0
)
_PICTURES = flags.DEFINE_string(
    "pictures", None, "Folder for PNG and SVG files, instead of the page."
)
_METRICS = flags.DEFINE_list("metrics", [], "Metrics to draw; default: all that change.")
_AGAINST = flags.DEFINE_enum("against", "step", list(AXES), "Horizontal axis.")
_LOG_X = flags.DEFINE_bool("log_x", False, "Use a logarithmic horizontal axis.")
_LOG_Y = flags.DEFINE_bool("log_y", False, "Use a logarithmic vertical axis.")
_FULL_RANGE = flags.DEFINE_bool("full_range", False, "Include outliers in the axes.")
_SMOOTHING = flags.DEFINE_float(
    "smoothing", 0.0, "Width of the moving average, in percent of the points.", 0, 100
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    if not arguments:
        raise ConfigError("give the runs, as in: python -m runner.report WORKDIR; see --help")
    if _PICTURES.value is not None and _TO.value is not None:
        raise ConfigError("give --to or --pictures, not both")
    if (_BASELINE.value is None) != (_MARGIN.value is None):
        raise ConfigError("give --baseline and --margin together; --margin=0 for any difference")
    with user_errors():
        runs = seen(arguments)
        if _PICTURES.value is not None:
            axes = (_AGAINST.value, _LOG_X.value, _LOG_Y.value)
            more = (_SMOOTHING.value / 100, _FULL_RANGE.value, print)
            write_pictures(runs, _PICTURES.value, _METRICS.value, *axes, *more)
            return FINISHED
        paths = [each.run.path.absolute() for each in runs]
        to = Path(_TO.value) if _TO.value else Path(os.path.commonpath(paths)) / FILE_NAME
        check_can_be_made(to)
        write_page(runs, to, _BASELINE.value, _MARGIN.value or 0.0)
    print(to)
    return FINISHED


if __name__ == "__main__":
    run(main)
