"""Averages the weights of a run's last checkpoints.

    python -m runner.average --from=RUN --last=5 --to=WORKDIR

WORKDIR gets the run's config and one checkpoint: the mean, at the step of the newest, without
optimizer state. runner.generate, evaluate, convert and --init_from take it like a run; training
cannot continue in it. docs/optimizers.md says when this helps.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from runner.command_line.command import run, show, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.new_folder import made_whole
from runner.errors import ConfigError, user_errors

_FROM = flags.DEFINE_string("from", None, "RUN, or RUN@STEP for checkpoints up to that step.")
_LAST = flags.DEFINE_integer(
    "last", 5, "Number of checkpoints; cfg.checkpoints.keep keeps more.", 2
)
_TO = flags.DEFINE_string("to", None, "Workdir to create.")

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

import jax
import numpy as np

from lmlib.checkpoint import Checkpoints
from lmlib.checkpoint.folders import reading, steps_in
from lmlib.checkpoint.manifest import read_manifest
from lmlib.optim.average import EVALUATED
from lmlib.storage.local_folder import local_folder
from lmlib.terminal.quantities import count_text, duration_text
from runner.config.references import RunReference, resolve

_CONFIGS = ("config.json", "settings.json", "config.txt")


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be busy with the run
    if arguments or not _FROM.value or not _TO.value:
        raise ConfigError("give --from and --to, as in: --from=RUN --to=WORKDIR; see --help")
    began = time.perf_counter()
    with user_errors():
        to, found = local_folder(_TO.value), resolve(_FROM.value)
        if not isinstance(found, RunReference):
            raise ConfigError(f"{found.name} is a model folder, not a run")
        steps = _chosen(found, _LAST.value)
        with made_whole(to) as unfinished:
            size = average(found.folder, steps, unfinished)
    took = duration_text(time.perf_counter() - began)
    of = ", ".join(f"{step:,}" for step in steps)
    print(f"{to} holds the mean of steps {of}, {count_text(size)} parameters; it took {took}")
    return FINISHED


def average(checkpoints: Path, steps: Sequence[int], to: Path) -> int:
    """Writes the mean of the weights at `steps` to the empty workdir `to`; returns their number.

    Raises ValueError or OSError if a checkpoint is damaged, or their weights differ in shape or
    dtype.
    """
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target: dict[str, jax.ShapeDtypeStruct] = {}
    means: dict[str, np.ndarray] = {}
    notes: dict[str, Any] = {}
    with Checkpoints(checkpoints, read_only=True) as opened:
        for count, step in enumerate(steps, 1):
            folder = checkpoints / str(step)
            show(f"reading {folder}")
            with reading(folder):
                saved = read_manifest(folder).arrays
                evaluated = any(name.startswith(f"{EVALUATED}.") for name in saved)
                part = EVALUATED if evaluated else "model"
                arrays = {
                    name.removeprefix(f"{part}."): jax.ShapeDtypeStruct(
                        each.shape, jax.numpy.dtype(each.dtype), sharding=device
                    )
                    for name, each in saved.items()
                    if name.startswith(f"{part}.")
                }
                target = target or arrays
                if target != arrays:
                    raise ConfigError(f"step {step} holds other weights than step {steps[0]}")
                weights, notes = opened.restore_part(step, part, target)
            for name, array in weights.items():
                mean = means.setdefault(name, np.zeros(array.shape))  # float64
                mean += (np.asarray(array, np.float64) - mean) / count
    for name in _CONFIGS:
        if (checkpoints.parent / name).is_file():
            shutil.copyfile(checkpoints.parent / name, to / name)
    notes = {name: note for name, note in notes.items() if name != "data"}
    state = {name: jax.numpy.asarray(mean, target[name].dtype) for name, mean in means.items()}
    with Checkpoints(to / "checkpoints") as written:
        written.save(steps[-1], {"model": state}, {**notes, "averaged": list(steps)})
    return sum(mean.size for mean in means.values())


def _chosen(found: RunReference, last: int) -> list[int]:
    """Returns the steps of a run's last checkpoints, up to the named one."""
    steps = steps_in(found.folder)
    if found.step is not None and found.step not in steps:
        raise ConfigError(
            f"{found.folder} has no whole checkpoint at step {found.step}; it has {steps}"
        )
    until = [step for step in steps if found.step is None or step <= found.step]
    if len(until) < last:
        raise ConfigError(
            f"{found.folder} has {len(until)} checkpoints, {until}, and --last is {last}: give "
            "less, or let the run keep more (cfg.checkpoints.keep)"
        )
    return until[-last:]


if __name__ == "__main__":
    run(main)
