"""Compiles a run's train step for absent hardware, and reports its memory, traffic and time."""

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
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lmlib.data.batch import has_whole_rows
from lmlib.experiment import Experiment
from lmlib.models.matrices.mxfp8 import unsupported
from lmlib.models.model import Model, longest_sequence
from lmlib.models.pipeline.schedule import schedule_of
from lmlib.parallel.layout import COMPUTE, mesh_axes_for, num_shards
from lmlib.parallel.matrix import number_of_weights
from lmlib.parallel.mesh import sizes_text
from lmlib.plan.collectives import Collectives, collectives
from lmlib.plan.communication_warnings import CommunicationWarning, communication_warnings
from lmlib.plan.flops import FlopsPerToken, count_flops
from lmlib.plan.memory import Memory, OutOfMemory, memory, out_of_memory
from lmlib.plan.program import Program, read_program
from lmlib.plan.scopes import Routing, scopes_of
from lmlib.plan.step_time import Estimate, estimate
from lmlib.plan.targets import Target
from lmlib.plan.traffic import Kernels, kernels, traffic
from lmlib.terminal.quantities import bytes_text, count_text, duration_text
from lmlib.terminal.table import columns, wrapped
from lmlib.train import trace_step

# Packages that decide how a program is compiled.
_PACKAGES = (
    *("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
CACHED = 4_096, 32_768  # lengths of texts whose caches are counted
_NO_CUDNN = (
    "cuDNN is not installed: planned with attention={!r} instead, which is slower than the run's; "
    "pip install nvidia-cudnn-cu12 (lmlib[cuda13] includes cuDNN)"
)


@dataclasses.dataclass(frozen=True)
class Report:
    """The plan of one train step on one target; `str()` gives all of it.

    `cache_bytes` is the size of the cache of one text, by its length, in generation without a mesh.
    `collectives`, `kernels` and `estimate` are `None` if the step does not fit, because then the
    compiler stops; `estimate` also if the hardware's speed is unknown. `memory` counts one device,
    `flops` the whole step. `seconds` is the time to trace and compile it here.
    """

    target: str
    mesh: dict[str, int]
    parameters: int
    batch_size: int
    sequence_length: int
    microbatches: int
    cache_bytes: dict[int, int]
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
            expected = self.estimate or f"unknown: the speed of {self.target} is unknown"
            time = f"{self.kernels}\n\n{expected}"
        mesh, plural = sizes_text(self.mesh), "es" * (self.microbatches > 1)
        heading = [
            f"{self.parameters:,} parameters on {self.target}{mesh and f', mesh {mesh}'}",
            f"{self.batch_size * self.sequence_length:,} tokens a step: {self.batch_size:,} "
            f"sequences of {self.sequence_length:,}, in {self.microbatches} microbatch{plural}",
        ]
        if self.cache_bytes:
            sizes = [f"{bytes_text(size)} at {n:,}" for n, size in self.cache_bytes.items()]
            heading.append(f"cache of one text in generation: {', '.join(sizes)} tokens")
        blocks = [
            "\n".join([*heading, *self.remarks]),
            section("Memory", str(self.memory)),
            section("Communication", communication),
            section("FLOPs", str(self.flops)),
            section("Time", time),
            f"compiled in {self.seconds:,.0f} s by {versions}",
        ]
        return wrapped("\n\n".join(blocks))

    def as_json(self) -> dict[str, Any]:
        """JSON values, in bytes, FLOPs and seconds."""
        fields = dataclasses.asdict(self)
        fields["memory"] |= {"needed": self.memory.needed, "fits": self.memory.fits}
        return json.loads(json.dumps(fields, default=str))  # dtypes by their names


def section(title: str, text: str) -> str:
    return f"{title}\n{'─' * len(title)}\n{text}"


def plan(
    experiment: Experiment,
    target: Target,
    tell: Callable[[str], None] = lambda line: None,
    imbalance: float = 1.0,
) -> Report:
    """Plans the train step of `experiment`, whose mesh is made of `target.devices()`.

    `tell` receives progress, a line at a time. `imbalance`, at least 1, is `Routing.imbalance`.
    Raises ValueError as `check` does.
    """
    check(experiment, target)
    began = time.perf_counter()
    tell(f"compiling the step for {target}")
    with stderr_kept() as log:
        experiment, remarks = compilable(experiment, target)
        state, batch = experiment.abstract_state(), experiment.abstract_batch()
        traced = trace_step(state, batch, experiment.training)
        result = _compiled(traced, experiment)
    seconds = time.perf_counter() - began
    tell(f"compiled in {seconds:.0f} s; reading the program")
    mesh, data, model = experiment.mesh, experiment.data, state.whole_model
    scopes, along = scopes_of(model), num_shards(mesh_axes_for("experts"), mesh)
    # With one device along `expert`, all rows are its own.
    routing = Routing(*(float(min(x, along)) for x in (imbalance, experiment.compute.expert_room)))
    flops = FlopsPerToken(
        analytic=experiment.flops_per_token(causal=False),
        analytic_causal=experiment.flops_per_token(causal=True),
        counted=count_flops(traced.jaxpr, scopes, routing),
        tokens=data.batch_size * data.sequence_length,
    )
    remarks += _bubble(experiment)
    program = sent = launched = expected = None
    warnings: tuple[CommunicationWarning, ...] = ()
    if not isinstance(result, OutOfMemory):
        program = read_program(result.as_text() or "", routing)
        sent = collectives(program, mesh)
        warnings = communication_warnings(sent, model, mesh, log.text)
        remarks += dense_expansions(program)
        launched = kernels(program)
        expected = estimate(flops, traffic(program, scopes), sent, target.accelerator, mesh)
    return Report(
        target=str(target),
        mesh=dict(mesh.shape),
        parameters=number_of_weights(model),
        batch_size=data.batch_size,
        sequence_length=data.sequence_length,
        microbatches=experiment.microbatches,
        cache_bytes=cache_bytes(model, experiment.compute.dtype),
        remarks=remarks,
        memory=memory(experiment, state, batch, target.accelerator, result, program, log.text),
        collectives=sent,
        warnings=warnings,
        flops=flops,
        kernels=launched,
        estimate=expected,
        seconds=round(seconds, 1),
        versions=versions(),
    )


def check(experiment: Experiment, target: Target) -> None:
    """Raises ValueError if the parts of `experiment` do not fit each other or `target`."""
    experiment.check()
    # The devices of the mesh are the compiler's, and may have kernels that the target's lack.
    borrowed = target.compiler.platform != target.accelerator.platform
    if borrowed and "mxfp8" in (experiment.compute.quantized or {}).values():
        raise unsupported(target.accelerator.device_kinds[0])


def cache_bytes(model: Model, dtype: str) -> dict[int, int]:
    """Returns the bytes of the cache of one text of each of `CACHED`; empty without a cache."""
    longest = longest_sequence(model)
    found = {}
    for length in CACHED if longest is None else [n for n in CACHED if n <= longest]:
        cache = jax.eval_shape(lambda model, n=length: model.empty_cache(1, n, dtype), model)
        found[length] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    return {length: size for length, size in found.items() if size}


def _compiled(
    traced: jax.stages.Traced, experiment: Experiment
) -> jax.stages.Compiled | OutOfMemory:
    try:
        with jax.set_mesh(experiment.mesh):
            return traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if (found := out_of_memory(str(error))) is None:
            raise
        return found


def compilable(experiment: Experiment, target: Target) -> tuple[Experiment, tuple[str, ...]]:
    """Returns `experiment`, or the closest one that compiles here, and remarks on differences."""
    compiler, remarks = target.compiler, list[str]()
    if compiler != target.accelerator:
        remarks.append(
            f"the compiler for {target.accelerator.name} is not installed here: compiled for "
            f"{compiler.name} instead, whose temporaries and fusions may differ; capacity and "
            f"speeds are from {target.accelerator.name}"
        )
    attention, split = experiment.compute.attention, num_shards(COMPUTE["seq"], experiment.mesh) > 1
    if compiler.platform != target.accelerator.platform and attention == "auto":
        attention = "blockwise"  # "auto" means this on GPUs of other vendors than NVIDIA
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
    """True if JAX finds cuDNN, which it needs to compile for absent GPUs too."""
    query = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.bfloat16)
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(attend, query, query, query)
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def stderr_kept() -> Iterator[types.SimpleNamespace]:
    """Captures the process's stderr instead of showing it; `text` has it in the end.

    It captures the file descriptor, because compilers do not write to Python's `sys.stderr`.
    """
    log = types.SimpleNamespace(text="")
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
    """Returns the versions of the installed packages that decide how a step is compiled."""
    found = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _bubble(experiment: Experiment) -> tuple[str, ...]:
    """A remark on the idle time of the pipeline's stages; empty without a pipeline."""
    compute = experiment.compute
    rows = experiment.data.batch_size // experiment.microbatches
    schedule = schedule_of(rows, compute, experiment.mesh)
    if schedule.stages == 1:
        return ()
    around = f", {schedule.rounds} rounds" if schedule.rounds > 1 else ""
    return (
        f"{schedule.stages} stages, {schedule.microbatches} microbatches of "
        f"{compute.pipeline_rows} rows of each device{around}: a stage is idle for "
        f"{schedule.bubble:.1%} of the layers' time (the bubble; more microbatches, or a larger "
        "--fdl.compute.pipeline_rounds, shrink it)",
    )


def dense_expansions(program: Program) -> tuple[str, ...]:
    """A warning if XLA has no kernel for a ragged product and multiplies all rows by all matrices.

    TPU kernels are custom calls. Compilers for CPUs get the expanded product without its origin, so
    their programs never give a warning.
    """
    products = (x for x, _ in program.instructions() if x.opcode in ("dot", "convolution"))
    paths = {x.op_name for x in products if "ragged_dot" in x.op_name.rpartition("/")[2]}
    return bool(paths) * (
        "warning: XLA expands jax.lax.ragged_dot into products of all rows with all matrices, as "
        f"many times more work as there are groups, in {', '.join(sorted(paths))}; use "
        "lmlib.models.experts.grouped.grouped_product, whose blocks do not",
    )


@dataclasses.dataclass(frozen=True)
class WholeRun:
    """The plan of each stage of a run, by its steps, counted from 0; `str()` gives a table."""

    stages: Mapping[range, Report]

    def __str__(self) -> str:
        rows = [("steps", "sequences", "of tokens", "tokens", "on each device", "at best")]
        stages = [(f"{x.start + 1:,} to {x.stop:,}", {x: one}) for x, one in self.stages.items()]
        for label, each in [*stages, ("all", self.stages)]:
            sums, sizes = WholeRun(each).as_json(), ("", "")
            if label != "all":
                (one,) = each.values()
                sizes = (f"{one.batch_size:,}", f"{one.sequence_length:,}")
            seconds = sums["seconds"]
            time = "unknown" if seconds is None else duration_text(seconds)
            needed = count_text(sums["tokens"]), bytes_text(sums["needed"])
            rows.append((label, *sizes, *needed, time))
        return columns(rows)

    def as_json(self) -> dict[str, Any]:
        """JSON values: tokens with padding, memory of the largest stage, and seconds at best."""
        stages = self.stages.items()
        times = [len(s) * one.estimate.step_seconds for s, one in stages if one.estimate]
        return {
            "tokens": sum(len(s) * one.batch_size * one.sequence_length for s, one in stages),
            "needed": max(one.memory.needed for _, one in stages),
            "seconds": math.fsum(times) if len(times) == len(stages) else None,
        }
