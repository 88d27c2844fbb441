"""Profiles training steps: records a trace of the devices, and summarises their time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from lmlib.experiment import Experiment
from lmlib.storage.atomic_file import write_atomically

S = TypeVar("S")


class Profiler:
    """Traces steps into a folder, for ui.perfetto.dev.

    with Profiler(folder, range(10, 13)) as profiler:
        make = profiler.traced(make)  # state, metrics = make(step, state, batch)
    """

    def __init__(
        self, folder: Path, steps: range | None, written: Callable[[int], None] = lambda steps: None
    ):
        """Prepares a trace.

        Args:
          steps: the steps to trace; `None` for none.
          written: called with the number of traced steps after the trace is written, unless an
            error ended the run.
        """
        self._folder, self._steps, self._written = folder, steps or range(0), written
        self._traced: int | None = None

    def traced(self, make: Callable[..., tuple[S, Any]]) -> Callable[..., tuple[S, Any]]:
        """Wraps a step function `state, metrics = make(step, state, batch)` to trace its steps."""

        def call(step: int, state: S, batch: Any) -> tuple[S, Any]:
            if step in self._steps and self._traced is None:
                jax.block_until_ready(state)  # ends the earlier steps
                jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
                self._traced = 0
            state, metrics = make(step, state, batch)
            if self._traced is not None:
                self._traced += 1
                if step + 1 not in self._steps:
                    jax.block_until_ready(metrics)
                    self._end(whole=True)
            return state, metrics

        return call

    def _end(self, whole: bool) -> None:
        if self._traced is not None:
            steps, self._traced = self._traced, None
            jax.profiler.stop_trace()
            if whole:
                self._written(steps)

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends a trace that is still active."""
        self._end(whole=kind is None)


def where_the_time_went(
    folder: Path,
    compiled: jax.stages.Compiled,
    experiment: Experiment,
    steps: int,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Returns tables of the time in the newest trace of `folder`, beside the estimates of plan.

    All kernels are written to folder/kernels.txt. If a file cannot be read or written, the text
    says so. `check` is as in `write_atomically`.
    """
    program = compiled.as_text()
    assert program is not None  # XLA programs always have a text
    device = experiment.mesh.devices.flat[0]
    # Imported here, since only runs with --profile need these modules.
    from lmlib.hardware.specifications import accelerator
    from lmlib.plan.flops import count_flops
    from lmlib.plan.scopes import scopes_of
    from lmlib.profile.step_profile import step_profile
    from lmlib.profile.trace import TraceError, newest_trace, read_trace

    known = accelerator(device.device_kind)
    scopes, matmuls = scopes_of(experiment.recipe.abstract_model), None
    if known is not None and known.flops:
        matmuls = count_flops(experiment.trace_step().jaxpr, scopes).matmuls
    try:
        executions = read_trace(newest_trace(folder), device.platform)
        profile = step_profile(executions, program, steps, scopes, known, matmuls)
    except (TraceError, OSError) as error:
        return f"WARNING: where the time went is not known: {error}"
    file = folder / "kernels.txt"
    try:
        write_atomically(file, profile.text(every_kernel=True) + "\n", check)
    except OSError as error:
        return f"{profile}\nWARNING: not all kernels are written: {error}"
    return f"{profile}\nall kernels are in {file}"
