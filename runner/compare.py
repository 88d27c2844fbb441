"""Compares finished runs: better, worse or inconclusive, and the equivalent compute.

    python -m runner.compare SWEEP
    python -m runner.compare RUN RUN RUN --baseline=optimizer.peak_lr=0.001 --margin=0.01

Arguments are workdirs, or folders that contain workdirs, such as a sweep's. Runs that differ only
in settings called `seed` are repetitions of one setting. Settings that do not change the numbers
are ignored too: mesh, microbatches, checkpoints, samples, actions, sinks, prefetch_batches,
validation, evaluation (the text must still be the same) and speed settings of compute.
"""

import json
from collections.abc import Sequence

from absl import flags

from runner.command_line.command import run, take_flags
from runner.command_line.exit_status import FINISHED
from runner.errors import ConfigError, user_errors

_BASELINE = flags.DEFINE_string(
    "baseline",
    None,
    "Run, or settings PATH=VALUE,PATH=VALUE: compares each group with the group that has these "
    "settings and is otherwise the same.",
)
_MARGIN = flags.DEFINE_float(
    "margin",
    None,
    "Smallest difference that matters, in the metric's unit; 0 for any.",
    lower_bound=0.0,
)
_METRIC = flags.DEFINE_string(
    "metric",
    "validation_loss",
    "Metric to compare. validation_bits_per_byte compares across tokenizers; also training_loss, "
    "validation_loss/NAME, or a metric of the objective.",
)
_HIGHEST = flags.DEFINE_bool("highest_is_best", False, "Higher is better, as for accuracies.")
_ERROR_RATE = flags.DEFINE_float(
    "error_rate",
    0.05,
    "Highest rate of calling a setting without an effect better.",
    lower_bound=1e-4,
    upper_bound=0.5,
)
_IGNORE = flags.DEFINE_multi_string("ignore", [], "Setting that may differ; repeatable.")
_JSON = flags.DEFINE_string("json", None, "File for all numbers.")

if __name__ == "__main__":
    take_flags()  # the imports below take a second

from lmlib.runs import find_runs
from lmlib.storage.atomic_file import write_atomically
from lmlib.verdicts import compare
from lmlib.verdicts.table import comparison_text


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    if not arguments:
        raise ConfigError("give runs or folders of runs: python -m runner.compare SWEEP")
    if (_BASELINE.value is None) != (_MARGIN.value is None):
        raise ConfigError(
            "give --baseline and --margin together: the margin is the smallest difference that "
            "counts, chosen before you look; --margin=0 for any"
        )
    with user_errors():
        found = compare(
            find_runs(arguments),
            *(_METRIC.value, _BASELINE.value, _MARGIN.value or 0.0, _ERROR_RATE.value),
            *(_IGNORE.value, _HIGHEST.value),
        )
        if _JSON.value:
            write_atomically(
                _JSON.value, json.dumps(found.as_json(), indent=1, allow_nan=False) + "\n"
            )
    print(comparison_text(found))
    return FINISHED


if __name__ == "__main__":
    run(main)
