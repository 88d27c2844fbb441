"""Replays a captured step, and shows the numbers of each layer.

    python -m runner.replay WORKDIR/captures/STEP

Starts at the capture's checkpoint and repeats every step up to the captured one, which takes the
captured batch. Status 0: its numbers equal the run's, bit for bit; 1: they differ; 2: the capture
cannot be read. On other devices, or another number of devices, numbers differ by rounding.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from runner.command_line.command import run, take_flags
from runner.command_line.exit_status import FINISHED
from runner.command_line.flags import INIT_FROM, TRUST_MODULE, key_flags
from runner.errors import ConfigError, user_errors

key_flags(INIT_FROM, TRUST_MODULE)

if __name__ == "__main__":
    take_flags()  # the imports below take seconds

import fiddle as fdl
import jax

from lmlib.checkpoint import Checkpoints
from lmlib.checkpoint.folders import steps_in
from lmlib.data.batch import Batch, place
from lmlib.data.resumable import Resumable
from lmlib.experiment import Experiment
from lmlib.experiment.stages import at
from lmlib.inspect.layer_statistics import first_offender, table
from lmlib.parallel.layout import sharding
from lmlib.state import State
from lmlib.terminal.table import columns
from runner.config import configs
from runner.config.text import printable
from runner.jax_settings.devices import start_devices
from runner.jax_settings.numbers import changes, settings_of_numbers
from runner.monitoring.progress import Progress
from runner.training.captures import Capture, read_batch, read_capture
from runner.training.divergence import statistics_of
from runner.weights.initial_weights import InitialWeights
from runner.weights.notes import WEIGHTS_ALONE
from runner.weights.target import LoadOptions

DIFFERS = 1  # exit status: the numbers differ from the run's
COMPARED = ("loss", "grad_norm", "parameter_norm", "update_norm", "skipped_updates")


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    if len(arguments) != 1:
        raise ConfigError("give the folder of a capture, WORKDIR/captures/STEP")
    folder = Path(arguments[0])
    start_devices()
    with user_errors():
        capture = read_capture(folder)
        cfg = configs.load(str(folder / "config.json"), trusted=TRUST_MODULE.value)
        experiment: Experiment = fdl.build(cfg)
        experiment.check()
        if capture.step > experiment.steps:
            steps = f"{experiment.steps:,} steps"
            raise ConfigError(f"{folder} is of step {capture.step:,}, and its config makes {steps}")
        rows = read_batch(folder, experiment.at(capture.step - 1).abstract_batch())
    return FINISHED if _replay(capture, experiment, rows) else DIFFERS


def _replay(capture: Capture, experiment: Experiment, rows: Batch) -> bool:
    """Replays and shows the step; returns True if its numbers equal the run's."""
    state, made = _begin(capture, experiment)
    compiled = {
        steps: stage.trace_step().lower().compile()
        for steps, stage in experiment.stages.items()
        if made < steps.stop and steps.start < capture.step
    }
    hyperparameters = experiment.training.hyperparameters
    layout = sharding("batch seq", experiment.mesh)
    with Progress(capture.step - 1) as progress:
        for step in range(made + 1, capture.step):
            began = time.perf_counter()
            placed = place(experiment.batches, step - 1, layout)
            state, metrics = at(compiled, step - 1)(state, placed, hyperparameters)
            loss = float(metrics["loss"])
            seconds = time.perf_counter() - began
            speed = rows.tokens.size / seconds
            progress.update(step, loss=loss, seconds=seconds, tokens_per_second=speed)
    batch = jax.tree.map(lambda field: jax.device_put(field, layout), rows)
    statistics = statistics_of(experiment.at(capture.step - 1), state, batch)
    _, metrics = at(compiled, capture.step - 1)(state, batch, hyperparameters)
    again = {name: value.item() for name, value in jax.device_get(metrics).items()}

    print(f"step {capture.step:,}, whose update was skipped:\n")
    lines = [("", "in the run", "replayed", "")]
    differing = []
    for name in COMPARED:
        was, now = capture.line[name], again[name]
        same = was == now or (math.isnan(was) and math.isnan(now))
        differing += [] if same else [name]
        lines.append((name, f"{was:.9g}", f"{now:.9g}", "same bits" if same else "differs"))
    print(columns(lines))
    print(f"\nstatistics of each layer:\n\n{table(statistics)}\n")
    offender = first_offender(statistics)
    print(f"the first number that is not finite is in {offender}" if offender else "all are finite")
    if differing and dict(experiment.mesh.shape) != capture.mesh:
        print(f"the run's mesh was {capture.mesh}, this is {dict(experiment.mesh.shape)}")
    if differing and (settings := changes(capture.jax_settings, settings_of_numbers())):
        print(f"the run had other settings of JAX: {printable(settings)}")
    return not differing


def _begin(capture: Capture, experiment: Experiment) -> tuple[State, int]:
    """Returns the state at the start of the capture, and its step."""
    folder, origin = capture.folder / "checkpoints", capture.initialised_from
    # The run already accepted these differences when it began.
    options = LoadOptions(TRUST_MODULE.value, show=print)
    given = InitialWeights(experiment, options, allowed_changes=("data", "model"))
    with user_errors():
        if steps_in(folder) == [WEIGHTS_ALONE]:
            origin = str(folder)
        elif folder.is_dir():
            target = experiment.abstract_state().changing
            with Checkpoints(folder, read_only=True) as checkpoints:
                found = checkpoints.restore_newest(target, fallback=False)
            if found is None:
                raise ConfigError(f"{folder} has no checkpoint")
            if isinstance(experiment.data, Resumable):
                experiment.data.restore(found.step, found.notes["data"])
            return given.complete(found, INIT_FROM.value), found.step
        return given.initial_state(origin)[0], 0


if __name__ == "__main__":
    run(main)
