"""Searches over settings and over meshes, for `python -m runner.plan`.

Each trial compiles the step for the target. `search` tries microbatches and saved activations,
`search_meshes` the sizes of mesh axes, and `advise` single changes that need less memory.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from lmlib.compute import EVERYTHING
from lmlib.data.batch import Batch
from lmlib.experiment import Experiment
from lmlib.inspect.saved_activations import saved_activations
from lmlib.parallel.layout import mesh_axes_for, num_shards
from lmlib.parallel.other_meshes import (
    REST,
    check_axes,
    divisions,
    with_fewer_copies,
    with_smaller_parts,
)
from lmlib.plan.flops import count_flops
from lmlib.plan.memory import Memory
from lmlib.plan.planner import Report, compilable, plan
from lmlib.plan.targets import Target
from lmlib.state import State
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns
from lmlib.train import gradient

Tell = Callable[[str], None]  # receives progress, a line at a time

# Numbers of microbatches tried beyond the smallest that fits. Fewer sequences at a time leave room
# to save more.
_MORE_COUNTS = 2
_SEQUENCE_PARALLEL = "--fdl.compute.sequence_parallel=True"


@dataclasses.dataclass(frozen=True)
class Trial:
    """The plan of an experiment with the settings in `flags`, as `python -m runner` takes them."""

    flags: tuple[str, ...]
    report: Report

    @property
    def fits(self) -> bool | None:
        return self.report.memory.fits

    @property
    def recomputed(self) -> float:
        """Fraction of the step's FLOPs that recompute activations."""
        counted = self.report.flops.counted
        return counted.of("recomputation") / counted.total

    @property
    def step_seconds(self) -> float | None:
        """The estimate; `None` if the step does not fit or the hardware's speed is unknown."""
        if self.fits is False or self.report.estimate is None:
            return None
        return self.report.estimate.step_seconds

    @property
    def rank(self) -> tuple[int | float, ...]:
        """Sorts trials that fit by time, and the others by memory."""
        if not self.fits:
            return (1, self.report.memory.needed)
        seconds = math.inf if self.step_seconds is None else self.step_seconds
        return (0, seconds, self.recomputed, self.report.microbatches)

    def row(self) -> tuple[str, ...]:
        memory, timed = self.report.memory, self.step_seconds is not None
        sent = self.report.collectives
        return (
            ("" if memory.counted else "at least ") + bytes_text(memory.needed),
            {True: "yes", False: "no", None: "unknown"}[self.fits],
            f"{self.recomputed:.1%}",
            f"{self.step_seconds:.3f}" if timed else "",
            f"{self.report.estimate.mfu:.1%}" if timed and self.report.estimate else "",
            "" if sent is None else bytes_text(sent.bytes_sent_per_step),
            " ".join(self.flags) or "as it is",
        )

    def as_json(self) -> dict[str, Any]:
        sent = self.report.collectives
        return {
            "flags": self.flags,
            "needed": self.report.memory.needed,
            "fits": self.fits,
            "step_seconds": self.step_seconds,
            "recomputed": self.recomputed,
            "bytes_sent": None if sent is None else sent.bytes_sent_per_step,
        }


@dataclasses.dataclass(frozen=True)
class Trials:
    """Compiled settings, the best first: settings that fit by time, then the rest by memory.

    `str()` gives a table. `impossible` has the flags of refused settings, and the reason.
    """

    trials: tuple[Trial, ...]
    impossible: tuple[tuple[tuple[str, ...], str], ...] = ()

    @property
    def best(self) -> Trial | None:
        """The first trial; `None` if it does not fit or the capacity is unknown."""
        return self.trials[0] if self.trials and self.trials[0].fits else None

    def __str__(self) -> str:
        head = ("needs", "fits", "recomputed", "expected step (s)", "MFU", "sent by each device")
        lines = [columns([(*head, "with"), *(trial.row() for trial in self.trials)])]
        lines += [f"{' '.join(flags)}: {reason}" for flags, reason in self.impossible]
        if self.best is not None:
            return "\n".join([*lines, "", "best:", f"  {self.best.row()[-1]}"])
        if any(trial.fits is False for trial in self.trials):
            lines += ["", "nothing fits that was tried: use more devices, or a smaller model"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """JSON values, in bytes and seconds."""
        refused = [{"flags": flags, "impossible": reason} for flags, reason in self.impossible]
        return {"trials": [*(trial.as_json() for trial in self.trials), *refused]}


def _sorted(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    return tuple(sorted(trials, key=lambda trial: trial.rank))


def keeping(experiment: Experiment, saved: tuple[str, ...]) -> Experiment:
    """Returns `experiment` with `compute.saved` set to `saved`."""
    compute = dataclasses.replace(experiment.compute, saved=saved)
    return dataclasses.replace(experiment, compute=compute)


def microbatch_counts(experiment: Experiment) -> list[int]:
    """Returns the numbers of microbatches that divide the rows of a device, ascending."""
    rows = experiment.data.batch_size // num_shards(mesh_axes_for("batch"), experiment.mesh)
    return [count for count in range(1, rows + 1) if rows % count == 0]


def _saved_flag(saved: tuple[str, ...]) -> str:
    return f'--fdl.compute.saved="{saved}"'


def _mesh_flags(sizes: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"--fdl.mesh.{axis}={size}" for axis, size in sizes.items())


def search(
    experiment: Experiment,
    target: Target,
    tell: Tell = lambda line: None,
    known: Report | None = None,
) -> Trials:
    """Searches for the fastest settings of `experiment` that fit the memory of `target`.

    First comes the smallest number of microbatches that fits if nothing is saved, then the most
    that can be saved with it and with the next larger numbers. `known` is the plan of `experiment`
    as it is, if it was made already.
    """
    experiment, _ = compilable(experiment, target)
    tried: dict[tuple[int, tuple[str, ...]], Trial] = {}

    def fits(count: int, saved: tuple[str, ...]) -> bool:
        return bool(attempt(count, saved).fits)

    def attempt(count: int, saved: tuple[str, ...]) -> Trial:
        if (count, saved) not in tried:
            flags = (f"--fdl.microbatches={count}", _saved_flag(saved))
            changed = keeping(dataclasses.replace(experiment, microbatches=count), saved)
            is_known = count == experiment.microbatches and saved == experiment.compute.saved
            report = known if known and is_known else _try(flags, changed, target, tell)
            tried[count, saved] = Trial(flags, report)
        return tried[count, saved]

    counts = microbatch_counts(experiment)
    first = bisect.bisect_left(counts, True, key=lambda count: fits(count, ()))
    if first < len(counts):
        tell("counting the FLOPs that each saved activation spares")
        candidates = policies(experiment)
        for count in counts[first : first + 1 + _MORE_COUNTS]:
            # Each candidate needs less memory than the one before.
            at = bisect.bisect_left(candidates, True, key=functools.partial(fits, count))
            if at < len(candidates) and attempt(count, candidates[at]).recomputed == 0:
                break  # fewer sequences at a time gain nothing more
    return Trials(_sorted(list(tried.values())))


def _try(flags: Sequence[str], experiment: Experiment, target: Target, tell: Tell) -> Report:
    tell(f"trying {' '.join(flags)}")
    report = plan(experiment, target)
    tell(report.memory.verdict)
    return report


def policies(experiment: Experiment) -> tuple[tuple[str, ...], ...]:
    """Returns values of `compute.saved` from all names to none; each has one name less.

    The next name to go spares the fewest FLOPs per byte, as counted in the traced step; among names
    that spare none it is the largest. A name spares more FLOPs once others are gone, because more
    must be recomputed on the way to it. Earlier counts are therefore lower bounds, and only the
    lowest is counted again.
    """
    sizes = _sizes(experiment)
    state, batch = experiment.abstract_state(), experiment.abstract_batch()
    counted = functools.cache(lambda saved: _recomputed_flops(experiment, state, batch, saved))

    def worth(name: str, saved: tuple[str, ...]) -> tuple[float, int]:
        others = tuple(other for other in saved if other != name)
        return (counted(others) - counted(saved)) / sizes[name], -sizes[name]

    saved = tuple(sizes)
    bounds = {name: worth(name, saved) for name in saved}
    found = [saved]
    while saved:
        lowest = min(bounds, key=lambda name: bounds[name])
        bounds[lowest] = worth(lowest, saved)
        if bounds[lowest] == min(bounds.values()):
            del bounds[lowest]
            saved = tuple(name for name in saved if name != lowest)
            found.append(saved)
    return tuple(found)


def _sizes(experiment: Experiment) -> dict[str, int]:
    """Bytes on each device of the model's activation names, without offloaded ones."""
    everything = keeping(experiment, EVERYTHING)
    sizes = dict.fromkeys(everything.compute.kept(experiment.recipe.abstract_model.names.saved), 0)
    for each in saved_activations(everything):
        if each.name in sizes:
            sizes[each.name] += each.bytes_per_device
    return {name: size for name, size in sizes.items() if size > 0}


def _recomputed_flops(
    experiment: Experiment, state: State, batch: Batch, saved: tuple[str, ...]
) -> float:
    """FLOPs of recomputation in the gradient; the optimizer's update recomputes nothing."""
    training = keeping(experiment, saved).training
    with jax.set_mesh(experiment.mesh):
        traced = jax.make_jaxpr(functools.partial(gradient, training=training))(state, batch)
    return count_flops(traced).of("recomputation")


def search_meshes(
    experiment: Experiment,
    target: Target,
    axes: Sequence[str],
    tell: Tell = lambda line: None,
    known: Report | None = None,
) -> Trials:
    """Plans `experiment` on every division of its devices among `axes` and `fsdp`.

    The other axes keep their sizes.

    Args:
      known: the plan of `experiment` as it is, if it was made already.

    Raises:
      ValueError: if one of `axes` is not a mesh axis, or is `fsdp`.
    """
    check_axes(axes)
    trials, impossible = [], []
    for mesh in divisions(experiment.mesh, axes):
        changed = dataclasses.replace(experiment, mesh=mesh)
        flags = _mesh_flags({axis: mesh.shape[axis] for axis in (REST, *axes)})
        try:
            changed.check()
        except ValueError as error:  # for example, more devices along `expert` than experts
            impossible.append((flags, str(error)))
            continue
        report = known if known and mesh == experiment.mesh else None
        trials.append(Trial(flags, report or _try(flags, changed, target, tell)))
    return Trials(_sorted(trials), tuple(impossible))


def advise(
    experiment: Experiment, target: Target, report: Report, tell: Tell = lambda line: None
) -> Trials:
    """Compiles changes of `experiment` that may need less memory, beside the experiment itself.

    `report` is the plan of `experiment` for `target`.
    """
    experiment, _ = compilable(experiment, target)
    tried = [Trial((), report)]
    for flags, changed in changes(experiment, report.memory):
        tried.append(Trial(flags, _try(flags, changed, target, tell)))
    return Trials(_sorted(tried))


def changes(experiment: Experiment, memory: Memory) -> Iterator[tuple[tuple[str, ...], Experiment]]:
    """Yields the changes that the model and the mesh allow, as flags and as an experiment.

    Settings that belong together change together. `memory` counts the step of `experiment`.
    """
    for flags, changed in _candidates(experiment, memory):
        try:
            changed.check()
        except ValueError:  # for example, the mesh does not divide the heads
            continue
        yield flags, changed


def _candidates(
    experiment: Experiment, memory: Memory
) -> Iterator[tuple[tuple[str, ...], Experiment]]:
    mesh, compute = experiment.mesh, experiment.compute

    def changed(*flags: str, **settings: Any) -> tuple[tuple[str, ...], Experiment]:
        return flags, dataclasses.replace(experiment, **settings)

    # Fewer sequences at a time.
    more = [count for count in microbatch_counts(experiment) if count > experiment.microbatches]
    if more:
        yield changed(f"--fdl.microbatches={more[0]}", microbatches=more[0])

    # Without the largest of the activations that are saved by choice.
    names = compute.kept(experiment.recipe.abstract_model.names.saved)
    sizes = {each.name: each.bytes_per_device for each in memory.saved if each.name in names}
    if sizes:
        others = tuple(name for name in names if name != max(sizes, key=lambda one: sizes[one]))
        yield (_saved_flag(others),), keeping(experiment, others)

    # Weights and moments split over devices that held copies of them, within a slice.
    wider = with_fewer_copies(mesh)
    if wider is not None:
        yield changed(*_differences(mesh, wider), mesh=wider)

    sequence_parallel = dataclasses.replace(compute, sequence_parallel=True)
    if num_shards(mesh_axes_for("mlp"), mesh) > 1 and not compute.sequence_parallel:
        yield changed(_SEQUENCE_PARALLEL, compute=sequence_parallel)

    # Twice the tensor parallelism. Half as many devices share the batch, so twice the microbatches
    # keep the sequences that a device has at a time.
    smaller = with_smaller_parts(mesh)
    if smaller is not None:
        count = 2 * experiment.microbatches
        flags = (*_differences(mesh, smaller), _SEQUENCE_PARALLEL, f"--fdl.microbatches={count}")
        yield changed(*flags, mesh=smaller, microbatches=count, compute=sequence_parallel)

    if experiment.trainable is not None and experiment.frozen_dtype != "int8":
        yield changed("--fdl.frozen_dtype=int8", frozen_dtype="int8")

    # Half as many logits at a time, where they are among the largest arrays.
    vocab = experiment.recipe.abstract_model.vocab // num_shards(mesh_axes_for("vocab"), mesh)
    for array in memory.largest_arrays:
        if array.shape[1:] == (vocab,) and array.shape[0] > 1:
            chunk = array.shape[0] // 2
            smaller_loss = dataclasses.replace(compute, loss_chunk=chunk)
            yield changed(f"--fdl.compute.loss_chunk={chunk}", compute=smaller_loss)
            break


def _differences(before: Mesh, after: Mesh) -> tuple[str, ...]:
    return _mesh_flags({
        axis: size for axis, size in after.shape.items() if size != before.shape[axis]
    })  # fmt: skip
