"""A search for the largest microbatch that fits, and for the least recomputation with it.

The search first finds the smallest number of microbatches that fits if nothing is kept, and then
what to keep. Each trial compiles the step. What a trial would need is guessed from the trials
before it, so that few are made.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from lmlib.compute import EVERYTHING
from lmlib.data.batch import Batch
from lmlib.experiment import Experiment
from lmlib.inspect.saved_activations import saved_activations
from lmlib.plan.flops import count_flops
from lmlib.plan.planner import Report, compilable, plan
from lmlib.plan.search.changes import keeping, microbatch_counts, microbatches_flag, saved_flag
from lmlib.plan.targets import Target
from lmlib.state import State
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns
from lmlib.train import gradient

# How many larger numbers of microbatches are tried besides the smallest that fits: fewer sequences
# at a time leave room to keep more.
_MORE_COUNTS = 2
# A trial is not made if the guess of what it needs is so much more than there is.
_HOPELESS = 1.25


@dataclasses.dataclass(frozen=True)
class Policy:
    """A value of `compute.saved`.

    Args:
      saved: the names.
      bytes: what they take on each device, in one microbatch of the experiment.
    """

    saved: tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class Trial:
    """Settings that were compiled.

    Args:
      microbatches: how many a batch is split into.
      saved: what `compute.saved` names.
      report: the plan with these settings.
    """

    microbatches: int
    saved: tuple[str, ...]
    report: Report

    @property
    def recomputed(self) -> float:
        """Share of the step's FLOPs that are spent on computing activations again."""
        counted = self.report.flops.counted
        return counted.of("recomputation") / counted.total

    @property
    def fits(self) -> bool:
        return bool(self.report.memory.fits)

    @property
    def flags(self) -> tuple[str, str]:
        """As `python -m runner` takes them."""
        return microbatches_flag(self.microbatches), saved_flag(self.saved)

    @property
    def step_seconds(self) -> float | None:
        """As estimated; `None` if the step does not fit, or nothing can be estimated."""
        estimate = self.report.estimate
        return None if estimate is None else estimate.step_seconds


@dataclasses.dataclass(frozen=True)
class Search:
    """All trials, those with the largest microbatches first; `str()` gives the table.

    `best` has the largest microbatch that fits, and recomputes least; `None` if nothing fits.
    `policies` are those that were chosen from; none if nothing fits.
    """

    trials: tuple[Trial, ...]
    best: Trial | None
    policies: tuple[Policy, ...]

    def __str__(self) -> str:
        head = ("microbatches", "sequences at a time", "needs", "fits", "computed again")
        rows = [(*head, "expected step (s)", "saved"), *map(self._row, self.trials)]
        return f"{columns(rows)}\n\n{self.verdict}"

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold; of the trials' reports the memory that they need, and the time."""
        trials = [
            {
                "microbatches": trial.microbatches,
                "saved": trial.saved,
                "recomputed": trial.recomputed,
                "needed": trial.report.memory.needed,
                "fits": trial.fits,
                "step_seconds": trial.step_seconds,
                "flags": trial.flags,
            }
            for trial in self.trials
        ]
        best = None if self.best is None else self.trials.index(self.best)
        return {"trials": trials, "best": best}

    @property
    def verdict(self) -> str:
        if self.best is None:
            return "nothing fits, whatever is kept and however few sequences are computed at a time"
        lines = [
            "the largest microbatch that fits, and with it the least that is computed again:",
            f"  {' '.join(self.best.flags)}",
        ]
        fitting = [trial for trial in self.trials if trial.fits and trial.step_seconds]
        fastest = min(fitting, key=lambda trial: trial.step_seconds or 0, default=self.best)
        if fastest is not self.best:
            lines += [
                "the fastest of those tried, by the estimate:",
                f"  {' '.join(fastest.flags)}",
            ]
        return "\n".join(lines)

    def _row(self, trial: Trial) -> tuple[str, ...]:
        report = trial.report
        at_a_time = report.batch_size // trial.microbatches
        at_least = "" if report.memory.counted else "at least "
        return (
            f"{trial.microbatches:,}",
            f"{at_a_time:,}",
            f"{at_least}{bytes_text(report.memory.needed)}",
            ("yes" if trial.fits else "no") + (", best" if trial is self.best else ""),
            f"{trial.recomputed:.1%} of FLOPs",
            f"{trial.step_seconds:.3f}" if trial.step_seconds else "",
            ", ".join(trial.saved) or "nothing",
        )


def search(
    experiment: Experiment,
    target: Target,
    tell: Callable[[str], None] = lambda line: None,
    known: Report | None = None,
) -> Search:
    """Searches for settings of `experiment` that fit the memory of `target`.

    Args:
      experiment: its mesh is made of `target.devices()`, as for `lmlib.plan.planner.plan`.
      target: whose memory is known.
      tell: told what is going on, a line at a time.
      known: the plan of `experiment` as it is, if that was made.
    """
    experiment, _ = compilable(experiment, target)
    searcher = _Searcher(experiment, target, tell)
    if known is not None:
        searcher.add(known)
    return searcher.search()


_NOTHING = Policy(saved=(), bytes=0)
_Choice = tuple[int, Policy]  # microbatches, and what to keep


class _Searcher:
    def __init__(self, experiment: Experiment, target: Target, tell: Callable[[str], None]) -> None:
        self._experiment = experiment
        self._target = target
        self._tell = tell
        self._trials: dict[_Choice, Trial] = {}

    def add(self, report: Report) -> None:
        """Makes a trial of the plan of the experiment as it is, if that keeps nothing."""
        if not self._experiment.compute.saved:
            count = self._experiment.microbatches
            self._trials[count, _NOTHING] = Trial(count, (), report)

    def search(self) -> Search:
        counts = microbatch_counts(self._experiment)
        self._try(self._experiment.microbatches, _NOTHING)  # what the first guess is made from
        least = self._first_that_fits([(count, _NOTHING) for count in counts])
        best, found_policies = None, tuple[Policy, ...]()
        if least is not None:
            self._tell("counting what each kept activation saves")
            found_policies = policies(self._experiment)
            first = counts.index(least.microbatches)
            for count in counts[first : first + 1 + _MORE_COUNTS]:
                found = self._first_that_fits([(count, policy) for policy in found_policies])
                best = best or found
                if found is not None and found.recomputed == 0:
                    break  # fewer sequences at a time gain nothing more
        trials = sorted(self._trials.values(), key=lambda one: (one.microbatches, -len(one.saved)))
        return Search(tuple(trials), best, found_policies)

    def _first_that_fits(self, choices: Sequence[_Choice]) -> Trial | None:
        """By bisection: each choice needs less memory than the one before."""
        low, high = -1, len(choices)  # the last known not to fit; the first known to, or the end
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
            kept = ", ".join(policy.saved) or "nothing"
            self._tell(f"trying microbatches={count}, saved: {kept}")
            changed = dataclasses.replace(self._experiment, microbatches=count)
            report = plan(keeping(changed, policy.saved), self._target)
            self._tell(report.memory.verdict)
            self._trials[count, policy] = Trial(count, policy.saved, report)
        return self._trials[count, policy]

    def _fraction(self, count: int, policy: Policy) -> float:
        """The memory needed over the memory there is, guessed from the trial most like it."""
        nearest, known = min(
            self._trials,
            key=lambda tried: (
                abs(tried[0] - count) / count,
                abs(len(tried[1].saved) - len(policy.saved)),
            ),
        )
        memory = self._trials[nearest, known].report.memory
        assert memory.capacity is not None
        # State and gradients stay as they are; the rest grows with the sequences at a time.
        weights = memory.parameters + memory.frozen + memory.reference_model + memory.gradients
        staying = weights + memory.optimizer_state + memory.batch
        working = memory.step - staying - self._kept(nearest, known)
        guess = staying + working * nearest / count + self._kept(count, policy)
        return guess / memory.capacity

    def _kept(self, count: int, policy: Policy) -> float:
        return policy.bytes * self._experiment.microbatches / count


def policies(experiment: Experiment) -> tuple[Policy, ...]:
    """Policies from all names to none; each has one name less than the one before.

    The name that goes is the one that saves the fewest FLOPs for each of its bytes, as counted in
    the traced step; of several that save none, the largest. A name saves more FLOPs once others are
    gone, since more has to be computed again on the way to it. So earlier counts are lower bounds,
    and only the lowest is counted anew.
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
    """Bytes of each name on each device, of those that the model has and does not offload."""
    everything = keeping(experiment, EVERYTHING)
    sizes = dict.fromkeys(everything.compute.kept(experiment.recipe.made.names.saved), 0)
    for kept in saved_activations(everything):
        if kept.name in sizes:
            sizes[kept.name] += kept.bytes_per_device
    return {name: size for name, size in sizes.items() if size > 0}


def _recomputed_flops(
    experiment: Experiment, state: State, batch: Batch, saved: tuple[str, ...]
) -> float:
    """With the abstract `state` and `batch` of `experiment`; an update computes nothing again."""
    training = keeping(experiment, saved).training
    with jax.set_mesh(experiment.mesh):
        traced = jax.make_jaxpr(functools.partial(gradient, training=training))(state, batch)
    return count_flops(traced).of("recomputation")
