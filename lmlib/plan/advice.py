"""Changes of an experiment's settings that make its step need less memory, found by compiling.

State, gradients and saved activations can be counted without compiling. The changes that spare most
of these are compiled.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import Mesh

from lmlib.experiment import Experiment
from lmlib.hardware.free_memory import bytes_per_device
from lmlib.inspect.saved_activations import saved_activations
from lmlib.parallel.layout import along, pieces
from lmlib.parallel.other_meshes import with_fewer_copies, with_smaller_parts
from lmlib.plan.memory import Memory
from lmlib.plan.planner import Report, compilable, plan
from lmlib.plan.search import (
    Tell,
    fits_text,
    keeping,
    microbatch_counts,
    microbatches_flag,
    needed_text,
    needs_as_json,
    saved_flag,
    step_text,
)
from lmlib.plan.targets import Target
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns

_MOST = 4  # changes that are compiled
_SEQUENCE_PARALLEL = "--fdl.compute.sequence_parallel=True"


@dataclasses.dataclass(frozen=True)
class Change:
    """An experiment with other settings.

    Args:
      flags: the settings, as flags of `python -m runner`.
      experiment: the experiment with them.
      spared: bytes of each device that it should spare, without those of state, gradients and saved
        activations.
    """

    flags: tuple[str, ...]
    experiment: Experiment
    spared: int = 0


@dataclasses.dataclass(frozen=True)
class Tried:
    """The flags of a change that was compiled, and its plan."""

    flags: tuple[str, ...]
    report: Report


@dataclasses.dataclass(frozen=True)
class Advice:
    """The plan before any change, and the changes that were tried, the least memory first.

    `str()` gives a table.
    """

    before: Report
    tried: tuple[Tried, ...]

    @property
    def helps(self) -> tuple[Tried, ...]:
        """The changes with which the step needs less memory."""
        least = self.before.memory.needed
        return tuple(each for each in self.tried if each.report.memory.needed < least)

    def __str__(self) -> str:
        lines = [
            f"of no help: {' '.join(each.flags)}, which needs {needed_text(each.report)}"
            for each in self.tried
            if each not in self.helps
        ]
        if not self.helps:
            lines.append("nothing that was tried needs less: use more devices, or a smaller model")
            return "\n".join(lines)
        rows = [("needs", "less by", "fits", "expected step (s)", "with")]
        for each in (Tried(("as it is",), self.before), *self.helps):
            less = self.before.memory.needed - each.report.memory.needed
            rows.append(
                (
                    needed_text(each.report),
                    bytes_text(less) if less else "",
                    fits_text(each.report),
                    step_text(each.report),
                    " ".join(each.flags),
                )
            )
        return "\n\n".join([columns(rows), *(["\n".join(lines)] if lines else [])])

    def as_json(self) -> list[dict[str, Any]]:
        """JSON values: the flags of each change, its memory in bytes and time in seconds."""
        return [{"flags": each.flags, **needs_as_json(each.report)} for each in self.tried]


def advise(
    experiment: Experiment, target: Target, report: Report, tell: Tell = lambda line: None
) -> Advice:
    """Compiles the most promising changes of `experiment`.

    Args:
      report: the plan of `experiment` for `target`.
      tell: receives progress, a line at a time.
    """
    experiment, _ = compilable(experiment, target)
    tell("counting the memory that changes of the settings would spare")
    before = _counted(experiment)
    spared: list[tuple[int, Change]] = []
    for change in changes(experiment, report.memory):
        less = before - _counted(change.experiment) + change.spared
        if less > 0:
            spared.append((less, change))
    spared.sort(key=lambda one: -one[0])
    tried = []
    for _, change in spared[:_MOST]:
        tell(f"trying {' '.join(change.flags)}")
        tried.append(Tried(change.flags, plan(change.experiment, target)))
        tell(tried[-1].report.memory.verdict)
    return Advice(report, tuple(sorted(tried, key=lambda each: each.report.memory.needed)))


def _counted(experiment: Experiment) -> int:
    """Bytes of each device: state, gradients, and the saved activations of one microbatch."""
    state = experiment.abstract_state()
    saved = saved_activations(experiment).bytes_per_device
    return bytes_per_device(state) + bytes_per_device(state.model) + saved


def changes(experiment: Experiment, memory: Memory) -> Iterator[Change]:
    """Yields the changes that the model and the mesh allow; settings that belong together change
    together.

    Args:
      memory: that of the step of `experiment`.
    """
    for change in _candidates(experiment, memory):
        try:
            change.experiment.check()
        except ValueError:  # for example, the mesh does not divide the heads
            continue
        yield change


def _candidates(experiment: Experiment, memory: Memory) -> Iterator[Change]:
    mesh, compute = experiment.mesh, experiment.compute

    def changed(*flags: str, spared: int = 0, **settings: Any) -> Change:
        return Change(flags, dataclasses.replace(experiment, **settings), spared)

    # Fewer sequences at a time.
    more = [count for count in microbatch_counts(experiment) if count > experiment.microbatches]
    if more:
        yield changed(microbatches_flag(more[0]), microbatches=more[0])

    # Without the largest of the activations that are saved by choice.
    names = compute.kept(experiment.recipe.made.names.saved)
    sizes = {each.name: each.bytes_per_device for each in memory.saved if each.name in names}
    if sizes:
        largest = max(sizes, key=lambda name: sizes[name])
        others = tuple(name for name in names if name != largest)
        yield Change((saved_flag(others),), keeping(experiment, others))

    # Weights and moments split over devices that held copies of them, within a slice.
    wider = with_fewer_copies(mesh)
    if wider is not None:
        yield changed(*_mesh_flags(mesh, wider), mesh=wider)

    sequence_parallel = dataclasses.replace(compute, sequence_parallel=True)
    if pieces(along("mlp"), mesh) > 1 and not compute.sequence_parallel:
        yield changed(_SEQUENCE_PARALLEL, compute=sequence_parallel)

    # Twice the tensor parallelism. Half as many devices share the batch, so twice the microbatches
    # keep the sequences that a device has at a time.
    smaller = with_smaller_parts(mesh)
    if smaller is not None:
        count = 2 * experiment.microbatches
        flags = (*_mesh_flags(mesh, smaller), _SEQUENCE_PARALLEL, microbatches_flag(count))
        yield changed(*flags, mesh=smaller, microbatches=count, compute=sequence_parallel)

    if experiment.trainable is not None and experiment.frozen_dtype != "int8":
        yield changed("--fdl.frozen_dtype=int8", frozen_dtype="int8")

    # Half as many logits at a time, where they are among the largest arrays.
    vocab = experiment.recipe.made.vocab // pieces(along("vocab"), mesh)
    for array in memory.largest_arrays:
        if array.shape[1:] == (vocab,) and array.shape[0] > 1:
            chunk = array.shape[0] // 2
            smaller_loss = dataclasses.replace(compute, loss_chunk=chunk)
            flag = f"--fdl.compute.loss_chunk={chunk}"
            yield changed(flag, compute=smaller_loss, spared=array.bytes // 2)
            break


def _mesh_flags(before: Mesh, after: Mesh) -> tuple[str, ...]:
    return tuple(
        f"--fdl.mesh.{axis}={size}"
        for axis, size in after.shape.items()
        if size != before.shape[axis]
    )
