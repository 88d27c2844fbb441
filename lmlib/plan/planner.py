"""Compiles a run's train step for hardware that is absent, and reads what it will need."""

import contextlib
import importlib.metadata
import math
import time
from collections.abc import Callable

import jax

from lmlib.experiment import Experiment
from lmlib.plan import compiler_log
from lmlib.plan.abstract_step import AbstractStep, abstract_step, traced
from lmlib.plan.collectives import collectives
from lmlib.plan.communication_warnings import communication_warnings
from lmlib.plan.compilable import compilable
from lmlib.plan.flops_per_token import flops_per_token
from lmlib.plan.memory import memory
from lmlib.plan.out_of_memory import OutOfMemory, out_of_memory
from lmlib.plan.program import read_program
from lmlib.plan.report import Report
from lmlib.plan.roofline import estimate
from lmlib.plan.targets import Target
from lmlib.plan.traffic import traffic

# What decides how a program is compiled, where it is installed.
_PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
)


def plan(
    experiment: Experiment, target: Target, tell: Callable[[str], None] = lambda line: None
) -> Report:
    """Plans the train step of `experiment`, whose mesh is made of `target.devices()`.

    Args:
      tell: told what is going on, a line at a time.

    Raises:
      ValueError: if the parts of the experiment do not fit each other.
    """
    experiment.check()
    began = time.perf_counter()
    tell(f"compiling the step for {target}")
    with compiler_log.captured() as log:
        experiment, remarks = compilable(experiment, target)
        step = abstract_step(experiment)
        result = compile_step(step)
    seconds = time.perf_counter() - began
    tell(f"compiled in {seconds:.0f} s")
    program = None if isinstance(result, OutOfMemory) else read_program(result.as_text() or "")
    mesh, model = experiment.mesh, step.state.model
    flops = flops_per_token(step)
    travelling = None if program is None else collectives(program, mesh)
    return Report(
        target=str(target),
        mesh=dict(mesh.shape),
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model)),
        batch_size=experiment.data.batch_size,
        sequence_length=experiment.data.sequence_length,
        microbatches=experiment.microbatches,
        remarks=remarks,
        memory=memory(step, target.accelerator, result, program),
        collectives=travelling,
        warnings=()
        if travelling is None
        else communication_warnings(travelling, model, mesh, log.text),
        flops=flops,
        estimate=None
        if program is None or travelling is None
        else estimate(
            flops.counted,
            traffic(program),
            travelling,
            target.accelerator,
            mesh,
            flops.tokens,
            flops.analytic,
            flops.analytic_causal,
        ),
        seconds=round(seconds, 1),
        versions=versions(),
    )


def compile_step(step: AbstractStep) -> jax.stages.Compiled | OutOfMemory:
    """The step that a run makes, compiled as the run does it."""
    try:
        with jax.set_mesh(step.experiment.mesh):
            return traced(step).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        found = out_of_memory(str(error))
        if found is None:
            raise
        return found


def versions() -> dict[str, str]:
    """Of the packages that decide how a step is compiled, those that are installed."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
