"""Fits L = E + A/N^α + B/D^β to finished runs of several sizes N and numbers of tokens D.

    python -m runner.ladder SWEEP
    python -m runner.ladder RUN RUN RUN RUN RUN RUN --budget=1e21
    python -m runner.ladder RUNGS --compute --budget=1e21

Runs of one size and several lengths, such as forks of one run, give E + B/D^β. If the runs do not
determine a number, the fit is refused, and the message names runs that would help. Rungs with one
dial, whose tokens follow from their parameters, give L = E + A/C^γ with compute C, which predicts
the next rung. N counts all parameters, including embeddings; D counts the targets that a run has
seen.
"""

import json
from collections.abc import Sequence

from absl import flags

from runner.command_line.command import run, take_flags
from runner.command_line.exit_status import FINISHED
from runner.errors import ConfigError, user_errors

_METRIC = flags.DEFINE_string("metric", "validation_loss", "Metric to fit; must be positive.")
_BUDGET = flags.DEFINE_multi_float(
    "budget", [], "FLOPs (6·N·D) to show the best N and D for; repeatable.", lower_bound=1.0
)
_COMPUTE = flags.DEFINE_bool("compute", False, "Fit the loss against compute only.")
_JSON = flags.DEFINE_string("json", None, "File for all numbers.")

if __name__ == "__main__":
    take_flags()  # the imports below take a second

from lmlib.runs import find_runs
from lmlib.storage.atomic_file import write_atomically
from lmlib.verdicts.ladder import ladder_of


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    if not arguments:
        raise ConfigError("give runs or folders of runs: python -m runner.ladder SWEEP")
    with user_errors():
        ladder = ladder_of(find_runs(arguments), _METRIC.value, _COMPUTE.value)
        text = ladder.text(_BUDGET.value)
        if _JSON.value:
            fields = ladder.as_json(_BUDGET.value)
            write_atomically(_JSON.value, json.dumps(fields, indent=1, allow_nan=False) + "\n")
    print(text)
    return FINISHED


if __name__ == "__main__":
    run(main)
