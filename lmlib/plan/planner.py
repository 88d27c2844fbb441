"""Compiles a run's train step for hardware that is absent, and reports what it will need."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from lmlib.data.batch import Batch, has_whole_rows
from lmlib.experiment import Experiment
from lmlib.parallel.layout import COMPUTE, pieces
from lmlib.parallel.mesh import sizes_text
from lmlib.plan.bubble import bubble
from lmlib.plan.communication.collectives import Collectives, collectives
from lmlib.plan.communication.warnings import CommunicationWarning, communication_warnings
from lmlib.plan.dense_expansion import dense_expansions
from lmlib.plan.estimate import Estimate, estimate
from lmlib.plan.flops import FlopsPerToken, count_flops
from lmlib.plan.memory import Memory, OutOfMemory, memory, out_of_memory
from lmlib.plan.program import read_program
from lmlib.plan.scopes import scopes_of
from lmlib.plan.targets import Target
from lmlib.plan.traffic import Kernels, kernels, traffic
from lmlib.state import State
from lmlib.train import trace_step

# What decides how a program is compiled, where it is installed.
_PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_NO_CUDNN = (
    "cuDNN is not installed here: planned with attention={!r} in its place, which is slower than "
    "what will run; pip install nvidia-cudnn-cu12 (beside lmlib[cuda13] it is there)"
)


@dataclasses.dataclass(frozen=True)
class Report:
    """A plan of one train step on one target; `str()` gives all of it.

    Args:
      target: as `--topology` takes it.
      mesh: sizes of the mesh's axes.
      parameters: of the whole model.
      batch_size, sequence_length, microbatches: of the step.
      remarks: on the plan as a whole.
      memory: of each device.
      collectives: of each device; `None` if the step does not fit, and was not compiled.
      warnings: what should not be in the communication.
      flops: of the whole step.
      kernels: of each device; `None` if the step does not fit.
      estimate: of the time; `None` where that is unknown.
      seconds: what tracing and compiling took here.
      versions: of what compiled it.
    """

    target: str
    mesh: dict[str, int]
    parameters: int
    batch_size: int
    sequence_length: int
    microbatches: int
    remarks: tuple[str, ...]
    memory: Memory
    collectives: Collectives | None
    warnings: tuple[CommunicationWarning, ...]
    flops: FlopsPerToken
    kernels: Kernels | None
    estimate: Estimate | None
    seconds: float
    versions: dict[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        communication = time = "unknown: the step does not fit"
        if self.collectives is not None:
            communication = "\n\n".join([str(self.collectives), *map(str, self.warnings)])
            expected = self.estimate or f"unknown: nothing is known of the speed of {self.target}"
            time = f"{self.kernels}\n\n{expected}"
        return "\n\n".join(
            [
                self._heading(),
                section("Memory", str(self.memory)),
                section("Communication", communication),
                section("FLOPs", str(self.flops)),
                section("Time", time),
                f"compiled in {self.seconds:,.0f} s by {versions}",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold; bytes, FLOPs and seconds."""
        fields = dataclasses.asdict(self)
        fields["memory"] |= {"needed": self.memory.needed, "fits": self.memory.fits}
        return json.loads(json.dumps(fields, default=str))  # dtypes by their names

    def _heading(self) -> str:
        mesh = sizes_text(self.mesh)
        plural = "es" * (self.microbatches > 1)
        return "\n".join(
            [
                f"{self.parameters:,} parameters on {self.target}{mesh and f', mesh {mesh}'}",
                f"{self.batch_size * self.sequence_length:,} tokens a step: {self.batch_size:,} "
                f"sequences of {self.sequence_length:,}, in {self.microbatches} microbatch{plural}",
                *self.remarks,
            ]
        )


def section(title: str, text: str) -> str:
    return f"{title}\n{'─' * len(title)}\n{text}"


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
    with stderr_kept() as log:
        experiment, remarks = compilable(experiment, target)
        step = traced_step(experiment)
        result = _compiled(step, experiment)
    seconds = time.perf_counter() - began
    tell(f"compiled in {seconds:.0f} s; reading the program")
    mesh, data, model = experiment.mesh, experiment.data, step.state.whole_model
    scopes = scopes_of(model)
    flops = FlopsPerToken(
        analytic=experiment.flops_per_token(causal=False),
        analytic_causal=experiment.flops_per_token(causal=True),
        counted=count_flops(step.traced.jaxpr, scopes),
        tokens=data.batch_size * data.sequence_length,
    )
    remarks += bubble(experiment)
    program = sent = launched = expected = None
    warnings: tuple[CommunicationWarning, ...] = ()
    if not isinstance(result, OutOfMemory):
        program = read_program(result.as_text() or "")
        sent = collectives(program, mesh)
        warnings = communication_warnings(sent, model, mesh, log.text)
        remarks += dense_expansions(program)
        launched = kernels(program)
        expected = estimate(flops, traffic(program, scopes), sent, target.accelerator, mesh)
    return Report(
        target=str(target),
        mesh=dict(mesh.shape),
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model)),
        batch_size=data.batch_size,
        sequence_length=data.sequence_length,
        microbatches=experiment.microbatches,
        remarks=remarks,
        memory=memory(experiment, step.state, step.batch, target.accelerator, result, program),
        collectives=sent,
        warnings=warnings,
        flops=flops,
        kernels=launched,
        estimate=expected,
        seconds=round(seconds, 1),
        versions=versions(),
    )


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A run's step as the run traces it; `state` and `batch` have layouts, and no arrays."""

    state: State
    batch: Batch
    traced: jax.stages.Traced


def traced_step(experiment: Experiment) -> TracedStep:
    """The step that a run of `experiment` makes, on the devices of its mesh."""
    state, batch = experiment.abstract_state(), experiment.abstract_batch()
    return TracedStep(state, batch, trace_step(state, batch, experiment.training))


def _compiled(step: TracedStep, experiment: Experiment) -> jax.stages.Compiled | OutOfMemory:
    try:
        with jax.set_mesh(experiment.mesh):
            return step.traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        found = out_of_memory(str(error))
        if found is None:
            raise
        return found


def compilable(experiment: Experiment, target: Target) -> tuple[Experiment, tuple[str, ...]]:
    """`experiment`, or one as near to it as can be compiled here, and remarks on what differs."""
    compiler, remarks = target.compiler, list[str]()
    if compiler != target.accelerator:
        remarks.append(
            f"the compiler for {target.accelerator.name} is not installed here: compiled for "
            f"{compiler.name} instead, whose temporaries and fusions may differ; capacity and "
            f"speeds are those of {target.accelerator.name}"
        )
    attention, split = experiment.compute.attention, pieces(COMPUTE["seq"], experiment.mesh) > 1
    if compiler.platform != target.accelerator.platform and attention == "auto":
        attention = "blockwise"  # what "auto" takes on GPUs that are not NVIDIA's
        experiment = _with_attention(experiment, attention)
    of_whole_rows = attention == "auto" and has_whole_rows(experiment.data) and not split
    may_be_cudnn = compiler.platform == "cuda" and (attention == "cudnn" or of_whole_rows)
    if may_be_cudnn and not _has_cudnn():
        in_its_place = "blockwise" if experiment.data.sequence_length % 16 else "triton"
        experiment = _with_attention(experiment, in_its_place)
        remarks.append(_NO_CUDNN.format(in_its_place))
    return experiment, tuple(remarks)


def _with_attention(experiment: Experiment, attention: str) -> Experiment:
    compute = dataclasses.replace(experiment.compute, attention=attention)
    return dataclasses.replace(experiment, compute=compute)


def _has_cudnn() -> bool:
    """Whether JAX finds the library, which it needs to compile for absent GPUs too."""
    query = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, query, query, query)
    except RuntimeError:
        return False
    return True


class CompilerLog:
    """`text` is what was written to stderr, once that is over."""

    text = ""


@contextlib.contextmanager
def stderr_kept() -> Iterator[CompilerLog]:
    """Keeps what the process writes to its stderr, and shows none of it.

    Compilers write to the file descriptor: they know nothing of Python's `sys.stderr`.
    """
    log = CompilerLog()
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            file.seek(0)
            log.text = file.read().decode(errors="replace")


def versions() -> dict[str, str]:
    """Of the packages that decide how a step is compiled, those that are installed."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
