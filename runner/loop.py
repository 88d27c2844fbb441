"""The loop over steps: dispatch a step, then read the metrics of the one before."""

from typing import Any

import jax

from lmlib import train
from lmlib.checkpoint import Checkpoints
from lmlib.data.prefetch import Prefetch
from lmlib.data.resumable import gather_states
from lmlib.experiment import Experiment
from runner.divergence import stop_if_diverged
from runner.profiling import Profiler
from runner.recorder import Recorder
from runner.validation import Validation


def run_steps(
    experiment: Experiment,
    compiled: jax.stages.Compiled,
    state: train.State,
    checkpoints: Checkpoints,
    batches: Prefetch,
    recorder: Recorder,
    validation: Validation | None,
    profiler: Profiler,
) -> train.State:
    """Makes a step of each batch; returns the final state.

    The metrics of a step are on disk before its checkpoint is, so that a resumed run finds a line
    for every step that it does not make again. The state of a `Resumable` source goes into the
    checkpoint, that of every process.
    """
    unread: tuple[int, train.Metrics, float] | None = None
    recorder.restart_clock()
    for index, batch in batches:
        step = index + 1
        profiler.before(step)
        state, metrics = compiled(state, batch)
        profiler.after(step, wait_for=metrics)
        if unread is not None:
            # Read while this step runs, so that the devices never wait for the host.
            line = recorder.read(*unread)
            recorder.write(line)
            stop_if_diverged(experiment, line, state, batch)
        unread = (step, metrics, batches.wait_seconds)

        last = step == experiment.steps
        evaluates = step % experiment.evaluate_every == 0 or last
        saves = step % experiment.checkpoint_every == 0 or last
        if evaluates or saves:
            line = recorder.read(*unread)
            if validation is not None and evaluates:
                line |= validation.metrics(state.model)
            recorder.write(line)
            stop_if_diverged(experiment, line, state, batch)
            unread = None
            if saves:
                progress: dict[str, Any] = {"tokens": recorder.tokens}
                if batches.state is not None:
                    progress["data"] = gather_states(batches.state)
                blocked = checkpoints.save(step, state, progress, line.get("validation_loss"))
                recorder.message(f"saving step {step:,} held training up for {blocked:.2f} s")
            recorder.restart_clock()
    return state
