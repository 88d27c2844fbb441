"""What would make a step need less memory, found by compiling it.

Of the changes that make sense, those are compiled of which the most is expected by what can be
counted without compiling: state, gradients and the activations that are kept.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from lmlib.experiment import Experiment
from lmlib.hardware.free_memory import bytes_per_device
from lmlib.inspect.saved_activations import saved_activations
from lmlib.plan.planner import Report, compilable, plan
from lmlib.plan.search.changes import Change, changes
from lmlib.plan.targets import Target
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns

_MOST = 4  # changes that are compiled


@dataclasses.dataclass(frozen=True)
class Tried:
    """A change that was compiled: its flags, as `python -m runner` takes them, and the plan."""

    flags: tuple[str, ...]
    report: Report


@dataclasses.dataclass(frozen=True)
class Advice:
    """What was tried against the plan `before`, the least memory first; `str()` gives a table."""

    before: Report
    tried: tuple[Tried, ...]

    @property
    def helps(self) -> tuple[Tried, ...]:
        """Those that need less."""
        least = self.before.memory.needed
        return tuple(each for each in self.tried if each.report.memory.needed < least)

    def __str__(self) -> str:
        others = [each for each in self.tried if each not in self.helps]
        lines = [
            f"of no help: {' '.join(each.flags)}, which needs {_needed(each.report)}"
            for each in others
        ]
        if not self.helps:
            lines.append("nothing that was tried needs less: use more devices, or a smaller model")
            return "\n".join(lines)
        rows = [("needs", "less by", "fits", "expected step (s)", "with")]
        rows.append((_needed(self.before), "", _fits(self.before), _step(self.before), "as it is"))
        for each in self.helps:
            less = self.before.memory.needed - each.report.memory.needed
            figures = _needed(each.report), bytes_text(less), _fits(each.report), _step(each.report)
            rows.append((*figures, " ".join(each.flags)))
        return "\n\n".join([columns(rows), *(["\n".join(lines)] if lines else [])])

    def as_json(self) -> list[dict[str, Any]]:
        """Of each change its flags, and what the step needs with it, in bytes and seconds."""
        return [
            {
                "flags": each.flags,
                "needed": each.report.memory.needed,
                "fits": each.report.memory.fits,
                "step_seconds": each.report.estimate and each.report.estimate.step_seconds,
            }
            for each in self.tried
        ]


def advise(
    experiment: Experiment,
    target: Target,
    report: Report,
    tell: Callable[[str], None] = lambda line: None,
) -> Advice:
    """Tries changes of `experiment` against the memory that its step takes.

    Args:
      report: the plan of `experiment` for `target`.
      tell: told what is going on, a line at a time.
    """
    experiment, _ = compilable(experiment, target)
    tell("counting what changes of the settings would spare")
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
    """Bytes of each device: state, gradients, and what one microbatch keeps."""
    state = experiment.abstract_state()
    kept = saved_activations(experiment).bytes_per_device
    return bytes_per_device(state) + bytes_per_device(state.model) + kept


def _needed(report: Report) -> str:
    at_least = "" if report.memory.counted else "at least "
    return f"{at_least}{bytes_text(report.memory.needed)}"


def _fits(report: Report) -> str:
    return "yes" if report.memory.fits else "no"


def _step(report: Report) -> str:
    return "" if report.estimate is None else f"{report.estimate.step_seconds:.3f}"
