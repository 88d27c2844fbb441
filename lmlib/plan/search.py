"""Searches over settings and over meshes. Each trial compiles the step for the target.

`search` looks for the smallest number of microbatches that fits when nothing is saved, and then for
the most that can be saved. Earlier trials predict what a trial needs, so few of them are made.
`search_meshes` plans the step on every division of the devices among some mesh axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lmlib.compute import EVERYTHING
from lmlib.data.batch import Batch
from lmlib.experiment import Experiment
from lmlib.inspect.saved_activations import saved_activations
from lmlib.parallel.layout import along, pieces
from lmlib.parallel.mesh import sizes_text
from lmlib.parallel.other_meshes import REST, check_axes, divisions
from lmlib.plan.flops import count_flops
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
# A trial is skipped if it is predicted to need this much more than the capacity.
_HOPELESS = 1.25


def keeping(experiment: Experiment, saved: tuple[str, ...]) -> Experiment:
    """Returns `experiment` with `compute.saved` set to `saved`."""
    compute = dataclasses.replace(experiment.compute, saved=saved)
    return dataclasses.replace(experiment, compute=compute)


def microbatch_counts(experiment: Experiment) -> list[int]:
    """Returns the numbers of microbatches that divide the rows of a device, ascending."""
    rows = experiment.data.batch_size // pieces(along("batch"), experiment.mesh)
    return [count for count in range(1, rows + 1) if rows % count == 0]


def microbatches_flag(count: int) -> str:
    return f"--fdl.microbatches={count}"


def saved_flag(saved: tuple[str, ...]) -> str:
    return f'--fdl.compute.saved="{saved}"'


def needed_text(report: Report) -> str:
    """Memory of each device; a lower bound if the compiler stopped for lack of room."""
    at_least = "" if report.memory.counted else "at least "
    return f"{at_least}{bytes_text(report.memory.needed)}"


def fits_text(report: Report) -> str:
    return {True: "yes", False: "no", None: "unknown"}[report.memory.fits]


def step_seconds(report: Report) -> float | None:
    """The estimate; `None` if the step does not fit or the hardware's speed is unknown."""
    if report.memory.fits is False or report.estimate is None:
        return None
    return report.estimate.step_seconds


def step_text(report: Report) -> str:
    seconds = step_seconds(report)
    return "" if seconds is None else f"{seconds:.3f}"


def needs_as_json(report: Report) -> dict[str, Any]:
    """Memory in bytes and time in seconds."""
    return {
        "needed": report.memory.needed,
        "fits": report.memory.fits,
        "step_seconds": step_seconds(report),
    }


@dataclasses.dataclass(frozen=True)
class Policy:
    """A value of `compute.saved`, and the bytes it takes on each device in one microbatch."""

    saved: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """The plan with these settings."""

    microbatches: int
    saved: tuple[str, ...]
    report: Report

    @property
    def recomputed(self) -> float:
        """Fraction of the step's FLOPs that recompute activations."""
        counted = self.report.flops.counted
        return counted.of("recomputation") / counted.total

    @property
    def fits(self) -> bool:
        return bool(self.report.memory.fits)

    @property
    def flags(self) -> tuple[str, str]:
        """The settings as flags of `python -m runner`."""
        return microbatches_flag(self.microbatches), saved_flag(self.saved)


@dataclasses.dataclass(frozen=True)
class Search:
    """All trials, largest microbatches first. `str()` gives a table.

    Args:
      trials: the compiled settings.
      best: the largest microbatch that fits, with the least recomputation; `None` if nothing fits.
      policies: the candidates for `compute.saved`; empty if nothing fits.
    """

    trials: tuple[Trial, ...]
    best: Trial | None
    policies: tuple[Policy, ...]

    def __str__(self) -> str:
        head = ("microbatches", "sequences at a time", "needs", "fits", "recomputed")
        rows = [(*head, "expected step (s)", "saved")]
        for trial in self.trials:
            rows.append(
                (
                    f"{trial.microbatches:,}",
                    f"{trial.report.batch_size // trial.microbatches:,}",
                    needed_text(trial.report),
                    ("yes" if trial.fits else "no") + (", best" if trial is self.best else ""),
                    f"{trial.recomputed:.1%} of FLOPs",
                    step_text(trial.report),
                    ", ".join(trial.saved) or "nothing",
                )
            )
        return f"{columns(rows)}\n\n{self.verdict}"

    def as_json(self) -> dict[str, Any]:
        """JSON values: the settings of each trial, its memory in bytes and time in seconds."""
        trials = [
            {
                "microbatches": trial.microbatches,
                "saved": trial.saved,
                "recomputed": trial.recomputed,
                "flags": trial.flags,
                **needs_as_json(trial.report),
            }
            for trial in self.trials
        ]
        best = None if self.best is None else self.trials.index(self.best)
        return {"trials": trials, "best": best}

    @property
    def verdict(self) -> str:
        if self.best is None:
            return "nothing fits, even with one sequence at a time and nothing saved"
        text = "the largest microbatch that fits, with the least recomputation:\n"
        text += f"  {' '.join(self.best.flags)}"
        timed = [trial for trial in self.trials if step_seconds(trial.report) is not None]
        fastest = min(timed, key=lambda one: step_seconds(one.report) or 0, default=self.best)
        if fastest is not self.best:
            text += f"\nthe fastest trial, by the estimate:\n  {' '.join(fastest.flags)}"
        return text


def search(
    experiment: Experiment,
    target: Target,
    tell: Tell = lambda line: None,
    known: Report | None = None,
) -> Search:
    """Searches for settings of `experiment` that fit the memory of `target`.

    Args:
      experiment: its mesh is made of `target.devices()`, as for `lmlib.plan.planner.plan`.
      target: its memory is known.
      tell: receives progress, a line at a time.
      known: the plan of `experiment` as it is, if it was made already.
    """
    experiment, _ = compilable(experiment, target)
    searcher = _Searcher(experiment, target, tell)
    if known is not None and not experiment.compute.saved:
        searcher.add(experiment.microbatches, _NOTHING, known)
    return searcher.search()


_NOTHING = Policy(saved=(), bytes=0)
_Choice = tuple[int, Policy]  # the number of microbatches, and what to save


class _Searcher:
    def __init__(self, experiment: Experiment, target: Target, tell: Tell) -> None:
        self._experiment = experiment
        self._target = target
        self._tell = tell
        self._trials: dict[_Choice, Trial] = {}

    def add(self, count: int, policy: Policy, report: Report) -> None:
        self._trials[count, policy] = Trial(count, policy.saved, report)

    def search(self) -> Search:
        counts = microbatch_counts(self._experiment)
        self._try(self._experiment.microbatches, _NOTHING)  # the first prediction starts from it
        least = self._first_that_fits([(count, _NOTHING) for count in counts])
        best, candidates = None, tuple[Policy, ...]()
        if least is not None:
            self._tell("counting the FLOPs that each saved activation spares")
            candidates = policies(self._experiment)
            first = counts.index(least.microbatches)
            for count in counts[first : first + 1 + _MORE_COUNTS]:
                found = self._first_that_fits([(count, policy) for policy in candidates])
                best = best or found
                if found is not None and found.recomputed == 0:
                    break  # fewer sequences at a time gain nothing more
        trials = sorted(self._trials.values(), key=lambda one: (one.microbatches, -len(one.saved)))
        return Search(tuple(trials), best, candidates)

    def _first_that_fits(self, choices: Sequence[_Choice]) -> Trial | None:
        """Bisects `choices`, each of which needs less memory than the one before."""
        low, high = -1, len(choices)  # choices up to low don't fit, and those from high on do
        while high - low > 1:
            between = range(low + 1, high)
            if high < len(choices) and self._fraction(*choices[high - 1]) > _HOPELESS:
                break
            hopeful = [at for at in between if self._fraction(*choices[at]) <= 1]
            at = hopeful[0] if hopeful else between[-1]
            if self._try(*choices[at]).fits:
                high = at
            else:
                low = at
        return self._trials[choices[high]] if high < len(choices) else None

    def _try(self, count: int, policy: Policy) -> Trial:
        if (count, policy) not in self._trials:
            saved = ", ".join(policy.saved) or "nothing"
            self._tell(f"trying microbatches={count}, saved: {saved}")
            changed = dataclasses.replace(self._experiment, microbatches=count)
            report = plan(keeping(changed, policy.saved), self._target)
            self._tell(report.memory.verdict)
            self.add(count, policy, report)
        return self._trials[count, policy]

    def _fraction(self, count: int, policy: Policy) -> float:
        """Predicts memory ÷ capacity from the most similar trial."""
        nearest, known = min(
            self._trials,
            key=lambda tried: (
                abs(tried[0] - count) / count,
                abs(len(tried[1].saved) - len(policy.saved)),
            ),
        )
        memory = self._trials[nearest, known].report.memory
        assert memory.capacity is not None
        # State and gradients keep their size. The rest grows with the sequences at a time.
        weights = memory.parameters + memory.frozen + memory.reference_model + memory.gradients
        staying = weights + memory.optimizer_state + memory.batch
        working = memory.step - staying - self._saved_bytes(nearest, known)
        guess = staying + working * nearest / count + self._saved_bytes(count, policy)
        return guess / memory.capacity

    def _saved_bytes(self, count: int, policy: Policy) -> float:
        return policy.bytes * self._experiment.microbatches / count


def policies(experiment: Experiment) -> tuple[Policy, ...]:
    """Returns policies from all names to none; each has one name less than the one before.

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
    return tuple(Policy(saved, sum(sizes[name] for name in saved)) for saved in found)


def _sizes(experiment: Experiment) -> dict[str, int]:
    """Bytes on each device of the model's activation names, without offloaded ones."""
    everything = keeping(experiment, EVERYTHING)
    sizes = dict.fromkeys(everything.compute.kept(experiment.recipe.made.names.saved), 0)
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


@dataclasses.dataclass(frozen=True)
class MeshTrial:
    """The plan on a mesh of these axis sizes, or the reason why there is none."""

    sizes: dict[str, int]
    outcome: Report | str

    @property
    def flags(self) -> tuple[str, ...]:
        """The sizes as flags of `python -m runner`."""
        return tuple(f"--fdl.mesh.{axis}={size}" for axis, size in self.sizes.items())

    @property
    def step_seconds(self) -> float | None:
        return None if isinstance(self.outcome, str) else step_seconds(self.outcome)


@dataclasses.dataclass(frozen=True)
class MeshSearch:
    """All trials, the fastest first. `str()` gives a table."""

    trials: tuple[MeshTrial, ...]

    @property
    def best(self) -> MeshTrial | None:
        """The fastest by the estimate; `None` if nothing fits or no time is known."""
        return next((one for one in self.trials if one.step_seconds is not None), None)

    def __str__(self) -> str:
        rows = [("mesh", "needs", "fits", "expected step (s)", "MFU", "sent by each device")]
        impossible = []
        for trial in self.trials:
            report = trial.outcome
            if isinstance(report, str):
                impossible.append(f"{sizes_text(trial.sizes)}: {report}")
                continue
            timed, sent = report.estimate and trial.step_seconds, _sent(report)
            rows.append(
                (
                    sizes_text(trial.sizes) or "1 device",
                    needed_text(report),
                    fits_text(report),
                    step_text(report),
                    f"{report.estimate.mfu:.1%}" if timed and report.estimate else "",
                    "" if sent is None else bytes_text(sent),
                )
            )
        lines = [columns(rows), *impossible]
        if self.best is not None:
            lines += ["", "the fastest, by the estimate:", f"  {' '.join(self.best.flags)}"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """JSON values: the sizes of each trial, its memory and traffic in bytes, its seconds."""
        trials = []
        for trial in self.trials:
            fields: dict[str, Any] = {"mesh": trial.sizes, "flags": trial.flags}
            if isinstance(trial.outcome, str):
                fields["impossible"] = trial.outcome
            else:
                fields |= needs_as_json(trial.outcome) | {"bytes_sent": _sent(trial.outcome)}
            trials.append(fields)
        return {"trials": trials}


def search_meshes(
    experiment: Experiment,
    target: Target,
    axes: Sequence[str],
    tell: Tell = lambda line: None,
    known: Report | None = None,
) -> MeshSearch:
    """Plans `experiment` on every division of its devices among `axes` and `fsdp`.

    The other axes keep their sizes.

    Args:
      known: the plan of `experiment` as it is, if it was made already.

    Raises:
      ValueError: if one of `axes` is not a mesh axis, or is `fsdp`.
    """
    check_axes(axes)
    trials = []
    for mesh in divisions(experiment.mesh, axes):
        changed = dataclasses.replace(experiment, mesh=mesh)
        sizes = {axis: mesh.shape[axis] for axis in (REST, *axes)}
        tell(f"trying {', '.join(f'{axis} {size}' for axis, size in sizes.items())}")
        try:
            changed.check()
        except ValueError as error:  # for example, more devices along `expert` than experts
            trials.append(MeshTrial(sizes, str(error)))
            continue
        report = known if known and mesh == experiment.mesh else plan(changed, target)
        tell(report.memory.verdict)
        trials.append(MeshTrial(sizes, report))
    return MeshSearch(tuple(sorted(trials, key=lambda trial: trial.step_seconds or math.inf)))


def _sent(report: Report) -> int | None:
    return None if report.collectives is None else report.collectives.bytes_sent_per_step
