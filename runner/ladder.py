"""Fits L = E + A/N^α + B/D^β to finished runs of several sizes N and numbers of tokens D.

    python -m runner.ladder SWEEP
    python -m runner.ladder RUN RUN RUN RUN RUN RUN --budget=1e21

Runs of one size and several lengths, such as forks of one run, give E + B/D^β. Numbers that the
runs do not identify are refused, and which runs would help is told.

--metric      validation_loss unless said, or another that is positive and lower for better models
--budget      FLOPs, as 6·N·D: the N and D that are best for it; repeatable
--json=FILE   writes all numbers as JSON too
N counts all parameters, those of embeddings too; D the targets that a run has seen.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from absl import flags

from lmlib.runs import find_runs
from lmlib.storage.whole_file import write_whole
from lmlib.verdicts.finished import USUAL_METRIC
from lmlib.verdicts.ladder import Ladder, ladder_of, ladder_text
from lmlib.verdicts.scaling_law import ScalingLaw
from runner.command_line.command import run
from runner.command_line.exit_status import FINISHED
from runner.errors import ConfigError, user_errors

_METRIC = flags.DEFINE_string("metric", USUAL_METRIC, "what is fitted")
_BUDGET = flags.DEFINE_multi_float("budget", [], "FLOPs to spend well", lower_bound=1.0)
_JSON = flags.DEFINE_string("json", None, "a file for all numbers as JSON")


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    if not arguments:
        raise ConfigError("name runs, or folders of runs: python -m runner.ladder SWEEP")
    with user_errors():
        ladder = ladder_of(find_runs(arguments), _METRIC.value)
        law = ladder.fit()
        text = ladder_text(ladder, law, _BUDGET.value)
        if _JSON.value:
            content = json.dumps(_as_json(ladder, law), indent=1, allow_nan=False)
            write_whole(_JSON.value, content + "\n")
    print(text)
    return FINISHED


def _as_json(ladder: Ladder, law: ScalingLaw) -> dict[str, Any]:
    return {
        "law": str(law),
        "metric": ladder.metric,
        "unit": ladder.unit,
        "interval": 0.9,
        "numbers": {name: dataclasses.asdict(each) for name, each in law.numbers.items()},
        "error": law.error,
        "runs": [
            {
                "run": str(each.run.path),
                "parameters": each.parameters,
                "tokens": each.tokens,
                "loss": each.value,
            }
            for each in ladder.runs
        ],
        "optima": {
            f"{flops:g}": {name: dataclasses.asdict(n) for name, n in law.optimum(flops).items()}
            for flops in _BUDGET.value
        },
        "left_out": list(ladder.left_out),
    }


if __name__ == "__main__":
    run(main)
