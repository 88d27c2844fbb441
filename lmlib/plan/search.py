"""The largest microbatch that fits, and with it the least that is computed again.

A microbatch is the larger the fewer there are in a batch, so microbatches are searched for first,
nothing being kept; then what to keep. Each trial compiles the step. What a trial would need is
guessed from those before, so that few are made.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from lmlib.experiment import Experiment
from lmlib.plan.advice import microbatch_counts
from lmlib.plan.compilable import compilable
from lmlib.plan.parts import size_text
from lmlib.plan.planner import plan
from lmlib.plan.policies import Policy, keeping, policies
from lmlib.plan.report import Report
from lmlib.plan.targets import Target
from lmlib.table import columns

# How many larger numbers of microbatches are tried besides the least that fits: fewer sequences at
# a time leave room to keep more.
_MORE_COUNTS = 2
# What is guessed to need so much more than there is, is not tried.
_HOPELESS = 1.25


@dataclasses.dataclass(frozen=True)
class Trial:
    """Settings that were compiled.

    Args:
      microbatches: parts of a batch.
      saved: what `model.saved` names.
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
        return f"--fdl.microbatches={self.microbatches}", f'--fdl.model.saved="{self.saved}"'

    @property
    def step_seconds(self) -> float | None:
        """As estimated; `None` if the step does not fit, or nothing can be estimated."""
        estimate = self.report.estimate
        return None if estimate is None else estimate.step_seconds


@dataclasses.dataclass(frozen=True)
class Search:
    """All trials, those with the largest microbatches first, and the one that was looked for.

    `best` is `None` if nothing fits. `str()` gives the table.
    """

    trials: tuple[Trial, ...]
    best: Trial | None

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
            return "nothing fits: use more devices, a smaller batch, or split more (mesh.tensor)"
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
            f"{at_least}{size_text(report.memory.needed)}",
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
    """Searches for the settings of `experiment`, as for `lmlib.plan.planner.plan`, that fit.

    Args:
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

    @functools.cached_property
    def _policies(self) -> tuple[Policy, ...]:
        """They keep ever less; the last keeps nothing."""
        self._tell("counting what each kept activation saves")
        return policies(self._experiment)

    def add(self, report: Report) -> None:
        """Takes the plan of the experiment as it is for a trial, if it keeps nothing."""
        if not self._experiment.abstract_model().saved:
            count = self._experiment.microbatches
            self._trials[count, _NOTHING] = Trial(count, (), report)

    def search(self) -> Search:
        counts = microbatch_counts(self._experiment)
        self._try(self._experiment.microbatches, _NOTHING)  # what the first guess is made from
        least = self._first_that_fits([(count, _NOTHING) for count in counts])
        best = None
        if least is not None:
            first = counts.index(least.microbatches)
            for count in counts[first : first + 1 + _MORE_COUNTS]:
                found = self._first_that_fits([(count, policy) for policy in self._policies])
                best = best or found
                if found is not None and found.recomputed == 0:
                    break  # fewer sequences at a time gain nothing more
        trials = sorted(self._trials.values(), key=lambda one: (one.microbatches, -len(one.saved)))
        return Search(tuple(trials), best)

    def _first_that_fits(self, choices: Sequence[_Choice]) -> Trial | None:
        """By bisection: each choice needs less memory than the one before."""
        low, high = -1, len(choices)  # what is known not to fit, and what is known to, or the end
        while high - low > 1:
            between = range(low + 1, high)
            if high < len(choices) and self._share(*choices[high - 1]) > _HOPELESS:
                break
            hopeful = [at for at in between if self._share(*choices[at]) <= 1]
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

    def _share(self, count: int, policy: Policy) -> float:
        """What would be needed, over what there is: a guess from the trial most like it."""
        nearest, known = min(
            self._trials,
            key=lambda tried: (
                abs(tried[0] - count) / count,
                abs(len(tried[1].saved) - len(policy.saved)),
            ),
        )
        memory = self._trials[nearest, known].report.memory
        assert memory.capacity is not None
        # State and gradients stay; all else is in proportion to the sequences at a time.
        staying = memory.parameters + memory.optimizer_state + memory.gradients + memory.batch
        working = memory.needed - staying - self._kept(nearest, known)
        guess = staying + working * nearest / count + self._kept(count, policy)
        return guess / memory.capacity

    def _kept(self, count: int, policy: Policy) -> float:
        return policy.bytes * self._experiment.microbatches / count
