"""What the devices did in some steps: a trace, and where its time went."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from lmlib.experiment import Experiment
from lmlib.storage.whole_file import write_whole

S = TypeVar("S")


class Profiler:
    """Traces steps into a folder.

    Of the files there, perfetto_trace.json.gz opens in ui.perfetto.dev.

        with Profiler(folder, steps_range("10:12"), written=tell) as profiler:
            profiler.before(10, wait_for=state)
            ...
            profiler.after(10, wait_for=metrics)
    """

    def __init__(
        self, folder: Path, steps: range | None, written: Callable[[int], None] = lambda steps: None
    ):
        """`steps=None` traces nothing. `written` is told how many steps a trace has, once it is
        written; it is not called if an error ended them."""
        self._folder = folder
        self._steps = steps or range(0)
        self._written = written
        self._traced: int | None = None

    def traced(self, make: Callable[..., tuple[S, Any]]) -> Callable[..., tuple[S, Any]]:
        """`made, metrics = make(step, state, batch)`, traced if it is one of the steps."""

        def call(step: int, state: S, batch: Any) -> tuple[S, Any]:
            self.before(step, wait_for=state)
            state, metrics = make(step, state, batch)
            self.after(step, wait_for=metrics)
            return state, metrics

        return call

    def before(self, step: int, wait_for: Any) -> None:
        """Begins the trace if `step` is the first of the steps, or a resumed run's first of them,
        once the arrays `wait_for`, those of earlier steps, exist."""
        if step not in self._steps:
            return
        if self._traced is None:
            jax.block_until_ready(wait_for)
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._traced = 0
        self._traced += 1

    def after(self, step: int, wait_for: Any) -> None:
        """Ends the trace if `step` is the last of the steps, once the arrays `wait_for` exist."""
        if self._traced is not None and step + 1 not in self._steps:
            jax.block_until_ready(wait_for)
            self._end(whole=True)

    def _end(self, whole: bool) -> None:
        if self._traced is not None:
            steps, self._traced = self._traced, None
            jax.profiler.stop_trace()
            if whole:
                self._written(steps)

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends the trace of a run that ends before the last of the steps."""
        self._end(whole=kind is None)


def where_the_time_went(
    folder: Path,
    compiled: jax.stages.Compiled,
    experiment: Experiment,
    steps: int,
    check: Callable[[], None] = lambda: None,
) -> str:
    """Tables of the newest trace in `folder`, which has `steps` steps; those of all kernels go into
    folder/kernels.txt, written as `write_whole` does with `check`.

    Beside what was measured stands what `runner.plan` expects, if it knows the devices. What cannot
    be read or written ends no run: the text says so.
    """
    program = compiled.as_text()
    assert program is not None  # XLA's programs have a text
    device = experiment.mesh.devices.flat[0]
    # Only a run with --profile needs these.
    from lmlib.hardware.specifications import accelerator
    from lmlib.plan.flops import count_flops
    from lmlib.plan.scopes import scopes_of
    from lmlib.profile.step_profile import step_profile
    from lmlib.profile.trace import TraceError, newest_trace, read_trace

    known = accelerator(device.device_kind)
    scopes, matmuls = scopes_of(experiment.recipe.made), None
    if known is not None and known.flops:
        matmuls = count_flops(experiment.trace_step().jaxpr, scopes).matmuls
    try:
        executions = read_trace(newest_trace(folder), device.platform)
        profile = step_profile(executions, program, steps, scopes, known, matmuls)
    except (TraceError, OSError) as error:
        return f"WARNING: where the time went is not known: {error}"
    file = folder / "kernels.txt"
    try:
        write_whole(file, profile.text(every_kernel=True) + "\n", check)
    except OSError as error:
        return f"{profile}\nWARNING: not all kernels are written: {error}"
    return f"{profile}\nall kernels are in {file}"
