"""Searches over settings and over meshes, for `python -m runner.plan`.

Each trial compiles the step for the target. `search` tries microbatches and saved activations,
`search_meshes` the sizes of mesh axes, and `advise` single changes that need less memory.
"""

import bisect
import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from lmlib.compute import EVERYTHING
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
from lmlib.plan.step_time import Estimate
from lmlib.plan.targets import Target
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns, wrapped
from lmlib.train import gradient

Tell = Callable[[str], None]  # receives progress, a line at a time

# Numbers of microbatches tried beyond the smallest that fits. Fewer sequences at a time leave room
# to save more.
_MORE_COUNTS = 2
# The `frozen_dtype` to try next.
_FEWER_BITS: dict[str | None, str | None] = {"int8": "nf4", "nf4": None, "mxfp4": None}
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
    def estimate(self) -> Estimate | None:
        """`None` if the step does not fit or the hardware's speed is unknown."""
        return None if self.fits is False else self.report.estimate

    @property
    def rank(self) -> tuple[int | float, ...]:
        """Sorts trials that fit by time, and the others by memory."""
        if not self.fits:
            return (1, self.report.memory.needed)
        seconds = math.inf if self.estimate is None else self.estimate.step_seconds
        return (0, seconds, self.recomputed, self.report.microbatches)

    def row(self) -> tuple[str, ...]:
        memory, estimate, sent = self.report.memory, self.estimate, self.report.collectives
        return (
            "at least " * (memory.counted is None) + bytes_text(memory.needed),
            {True: "yes", False: "no", None: "unknown"}[self.fits],
            f"{self.recomputed:.1%}",
            *((f"{estimate.step_seconds:.3f}", f"{estimate.mfu:.1%}") if estimate else ("", "")),
            "" if sent is None else bytes_text(sent.bytes_sent_per_step),
            " ".join(self.flags) or "unchanged",
        )

    def as_json(self) -> dict[str, Any]:
        sent = self.report.collectives
        return {
            "flags": self.flags,
            "needed": self.report.memory.needed,
            "fits": self.fits,
            "step_seconds": self.estimate and self.estimate.step_seconds,
            "recomputed": self.recomputed,
            "bytes_sent": None if sent is None else sent.bytes_sent_per_step,
        }


@dataclasses.dataclass(frozen=True)
class Trials:
    """Compiled settings, which `trials` lists with the best first.

    `str()` gives a table. `impossible` has the flags of refused settings, and the reason.
    """

    tried: Iterable[Trial]
    impossible: Sequence[tuple[tuple[str, ...], str]] = ()

    @functools.cached_property
    def trials(self) -> tuple[Trial, ...]:
        """Settings that fit by time, then the rest by memory."""
        return tuple(sorted(self.tried, key=lambda trial: trial.rank))

    @property
    def best(self) -> Trial | None:
        """The first trial; `None` if it does not fit or the capacity is unknown."""
        return self.trials[0] if self.trials and self.trials[0].fits else None

    def __str__(self) -> str:
        head = ("needs", "fits", "recomputed", "expected step (s)", "MFU", "sent by each device")
        lines = [columns([(*head, "with"), *(trial.row() for trial in self.trials)])]
        lines += [wrapped(f"{' '.join(flags)}: {reason}") for flags, reason in self.impossible]
        if self.best is not None:
            return "\n".join([*lines, "", "best:", f"  {self.best.row()[-1]}"])
        if any(trial.fits is False for trial in self.trials):
            lines += ["", "no setting fits: use more devices or a smaller model"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """JSON values, in bytes and seconds."""
        refused = [{"flags": flags, "impossible": reason} for flags, reason in self.impossible]
        return {"trials": [*(trial.as_json() for trial in self.trials), *refused]}


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


def _mesh_flags(mesh: Mesh, axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"--fdl.mesh.{axis}={mesh.shape[axis]}" for axis in axes)


def _changed_axes(before: Mesh, after: Mesh) -> tuple[str, ...]:
    return _mesh_flags(after, [a for a, size in after.shape.items() if size != before.shape[a]])


def search(
    experiment: Experiment,
    target: Target,
    tell: Tell = lambda line: None,
    known: Report | None = None,
    imbalance: float = 1.0,
) -> Trials:
    """Searches for the fastest settings of `experiment` that fit the memory of `target`.

    First comes the smallest number of microbatches that fits if nothing is saved, then the most
    that can be saved with it and with the next larger numbers. `known` is the plan of `experiment`
    as it is, if it was made already, and `imbalance` as for `plan`.
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
            report = known if is_known else None
            tried[count, saved] = _try(flags, changed, target, tell, report, imbalance)
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
    return Trials(tried.values())


def _try(
    flags: tuple[str, ...],
    experiment: Experiment,
    target: Target,
    tell: Tell,
    known: Report | None = None,
    imbalance: float = 1.0,
) -> Trial:
    """Plans `experiment`, unless its plan is `known`."""
    if known is None:
        tell(f"trying {' '.join(flags)}")
        known = plan(experiment, target, imbalance=imbalance)
        tell(known.memory.verdict)
    return Trial(flags, known)


def policies(experiment: Experiment) -> tuple[tuple[str, ...], ...]:
    """Returns values of `compute.saved` from all names to none; each has one name less.

    The next name to go spares the fewest FLOPs per byte, as counted in the traced step; among names
    that spare none it is the largest. A name spares more FLOPs once others are gone, because more
    must be recomputed on the way to it. Earlier counts are therefore lower bounds, and only the
    lowest is counted again.
    """
    everything = keeping(experiment, EVERYTHING)
    names = everything.compute.kept(experiment.recipe.abstract_model.names.saved)
    sizes = dict.fromkeys(names, 0)  # bytes on each device, without offloaded activations
    for each in saved_activations(everything):
        if each.name in sizes:
            sizes[each.name] += each.bytes_per_device
    sizes = {name: size for name, size in sizes.items() if size > 0}
    state, batch = experiment.abstract_state(), experiment.abstract_batch()

    @functools.cache
    def counted(saved: tuple[str, ...]) -> float:
        """FLOPs of recomputation in the gradient; the optimizer's update recomputes nothing."""
        step = functools.partial(gradient, training=keeping(experiment, saved).training)
        with jax.set_mesh(experiment.mesh):
            return count_flops(jax.make_jaxpr(step)(state, batch)).of("recomputation")

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


def search_meshes(
    experiment: Experiment,
    target: Target,
    axes: Sequence[str],
    tell: Tell = lambda line: None,
    known: Report | None = None,
    imbalance: float = 1.0,
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
        flags = _mesh_flags(mesh, (REST, *axes))
        try:
            changed.check()
        except ValueError as error:  # for example, more devices along `expert` than experts
            impossible.append((flags, str(error)))
            continue
        report = known if mesh == experiment.mesh else None
        trials.append(_try(flags, changed, target, tell, report, imbalance))
    return Trials(trials, impossible)


def advise(
    experiment: Experiment,
    target: Target,
    report: Report,
    tell: Tell = lambda line: None,
    imbalance: float = 1.0,
) -> Trials:
    """Compiles changes of `experiment` that may need less memory, beside the experiment itself.

    `report` is the plan of `experiment` for `target`.
    """
    experiment, _ = compilable(experiment, target)
    found = changes(experiment, report.memory)
    tried = (_try(*each, target, tell, None, imbalance) for each in found)
    return Trials([Trial((), report), *tried])


def changes(experiment: Experiment, memory: Memory) -> Iterator[tuple[tuple[str, ...], Experiment]]:
    """Yields the changes that the model and the mesh allow, as flags and as an experiment.

    Settings that belong together change together. `memory` counts the step of `experiment`.
    """
    for flags, changed in _candidates(experiment, memory):
        with contextlib.suppress(ValueError):  # for example, the mesh does not divide the heads
            changed.check()
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
    sizes = Counter[str]()
    for each in memory.saved:
        if each.name in names:
            sizes[each.name] += each.bytes_per_device
    if sizes:
        others = tuple(name for name in names if name != max(sizes, key=lambda one: sizes[one]))
        yield (_saved_flag(others),), keeping(experiment, others)

    # Weights and moments split over devices that held copies of them, within a slice.
    wider = with_fewer_copies(mesh)
    if wider is not None:
        yield changed(*_changed_axes(mesh, wider), mesh=wider)

    sequence_parallel = dataclasses.replace(compute, sequence_parallel=True)
    if num_shards(mesh_axes_for("mlp"), mesh) > 1 and not compute.sequence_parallel:
        yield changed(_SEQUENCE_PARALLEL, compute=sequence_parallel)

    # Twice the tensor parallelism. Half as many devices share the batch, so twice the microbatches
    # keep the sequences that a device has at a time.
    smaller = with_smaller_parts(mesh)
    if smaller is not None:
        count = 2 * experiment.microbatches
        flags = (*_changed_axes(mesh, smaller), _SEQUENCE_PARALLEL, f"--fdl.microbatches={count}")
        yield changed(*flags, mesh=smaller, microbatches=count, compute=sequence_parallel)

    if experiment.trainable is not None:
        fewer_bits = _FEWER_BITS.get(experiment.frozen_dtype, "int8")
        if fewer_bits is not None:
            yield changed(f"--fdl.frozen_dtype={fewer_bits}", frozen_dtype=fewer_bits)

    # Half as many logits at a time, where they are among the largest arrays.
    vocab = experiment.recipe.abstract_model.vocab // num_shards(mesh_axes_for("vocab"), mesh)
    for array in memory.largest_arrays:
        if array.shape[1:] == (vocab,) and array.shape[0] > 1:
            chunk = array.shape[0] // 2
            smaller_loss = dataclasses.replace(compute, loss_chunk=chunk)
            yield changed(f"--fdl.compute.loss_chunk={chunk}", compute=smaller_loss)
            break
