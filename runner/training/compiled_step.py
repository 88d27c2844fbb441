"""Compiles the train steps of a run."""

import time

import jax

from lmlib.parallel.axes import PartError
from lmlib.terminal.quantities import bytes_text, duration_text
from runner.errors import ConfigError, user_errors
from runner.training.run import Run


def check_profile(run: Run) -> None:
    """Raises ConfigError if the steps to profile belong to several stages."""
    traced = run.options.profile or range(0)
    for steps in run.experiment.stages:
        if steps.start in traced and steps.start + 1 in traced:
            raise ConfigError(
                f"--profile: steps {steps.start:,} and {steps.start + 1:,} belong to different "
                f"stages; trace up to step {steps.start:,}, or from {steps.start + 1:,} on"
            )


def compile_steps(run: Run, made: int) -> dict[range, jax.stages.Compiled]:
    """Compiles the steps of the stages that remain after `made` steps, so errors appear early.

    Returns:
      The compiled step of each stage, by the stage's range of steps, counted from 0.
    """
    compiled = {}
    for steps, stage in run.experiment.stages.items():
        if steps.stop <= made and steps.stop < run.experiment.steps:
            continue
        title = f"the step from {steps.start + 1:,} on" if steps.start else "the step"
        began = time.perf_counter()
        run.tell(f"compiling {title}")
        with user_errors((PartError,)):
            lowered = stage.trace_step().lower()
        compiled[steps] = program = lowered.compile()
        run.tell(f"compiled {title} in {duration_text(time.perf_counter() - began)}")
        memory = program.memory_analysis()
        if memory is not None:  # some platforms don't report it
            run.tell(
                f"memory per device: {bytes_text(memory.argument_size_in_bytes)} for state and "
                f"batch, {bytes_text(memory.temp_size_in_bytes)} for temporaries"
            )
        if run.options.dump_hlo and run.primary:
            name = f"train_step_{steps.start + 1}" if steps.start else "train_step"
            file = run.workdir / "hlo" / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(program.as_text() or "", encoding="utf-8")
            run.tell(f"wrote {file}")
    return compiled
