"""The benefit of a teacher: the student of experiments/distil with and without it, over seeds.

    python -m runner --fdl_config=experiments/quickstart --workdir=/tmp/quickstart
    python benchmarks/distillation.py [--teacher=/tmp/quickstart] [--seeds=3] [--workdir=DIR]

Both students have the same initial weights, batches and steps; only the objective differs. Prints
the final validation loss of each, in nats per token over the full split. Finished runs in the
workdir are reused.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from lmlib.terminal.table import columns
from runner import fit
from runner.config import configs

_TEACHER = flags.DEFINE_string("teacher", "/tmp/quickstart", "Run of the quickstart.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds.")
_WORKDIR = flags.DEFINE_string("workdir", "/tmp/students", "Folder of the students' runs.")


def loss(seed: int, fiddlers: Sequence[str]) -> float:
    """Returns a student's cross-entropy on the validation split, in nats per token."""
    overrides = [f"teacher={_TEACHER.value}", f"seed={seed}", "samples.prompts=()"]
    cfg = configs.load("experiments/distil", fiddlers, overrides)
    summary = fit(cfg, Path(_WORKDIR.value, "_".join([*fiddlers, f"seed_{seed}"]))).summary
    name = "validation_loss" if "alone" in fiddlers else "validation_cross_entropy"
    return summary.validation[name].value


def main(arguments: Sequence[str]) -> None:
    table = [("seed", "alone", "taught", "difference")]
    differences = []
    for seed in range(_SEEDS.value):
        alone, taught = loss(seed, ["alone"]), loss(seed, [])
        differences.append(taught - alone)
        table.append((str(seed), f"{alone:.4f}", f"{taught:.4f}", f"{taught - alone:+.4f}"))
    print(columns(table))
    print(f"on average {statistics.mean(differences):+.4f} nats per token")


if __name__ == "__main__":
    app.run(main)
