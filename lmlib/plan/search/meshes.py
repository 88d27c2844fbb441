"""The same step on every division of the same devices among some axes of the mesh."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from lmlib.experiment import Experiment
from lmlib.parallel.mesh import sizes_text
from lmlib.parallel.other_meshes import REST, check_axes, divisions
from lmlib.plan.planner import Report, plan
from lmlib.plan.targets import Target
from lmlib.terminal.quantities import bytes_text
from lmlib.terminal.table import columns


@dataclasses.dataclass(frozen=True)
class MeshTrial:
    """A mesh that was tried.

    Args:
      sizes: of its axes.
      outcome: the plan with it, or why there is none.
    """

    sizes: dict[str, int]
    outcome: Report | str

    @property
    def flags(self) -> tuple[str, ...]:
        """As `python -m runner` takes them."""
        return tuple(f"--fdl.mesh.{axis}={size}" for axis, size in self.sizes.items())

    @property
    def step_seconds(self) -> float | None:
        """As estimated; `None` if the step does not fit, or nothing can be estimated."""
        fits = isinstance(self.outcome, Report) and self.outcome.memory.fits is not False
        if not isinstance(self.outcome, Report) or not fits or self.outcome.estimate is None:
            return None
        return self.outcome.estimate.step_seconds


@dataclasses.dataclass(frozen=True)
class MeshSearch:
    """All trials, the fastest first; `str()` gives the table."""

    trials: tuple[MeshTrial, ...]

    @property
    def best(self) -> MeshTrial | None:
        """The fastest by the estimate; `None` if nothing fits or no time is known."""
        known = [trial for trial in self.trials if trial.step_seconds is not None]
        return known[0] if known else None

    def __str__(self) -> str:
        head = ("mesh", "needs", "fits", "expected step (s)", "MFU", "sent by each device")
        rows = [head, *(_row(trial) for trial in self.trials if isinstance(trial.outcome, Report))]
        lines = [columns(rows)]
        lines += [
            f"{sizes_text(trial.sizes)}: {trial.outcome}"
            for trial in self.trials
            if isinstance(trial.outcome, str)
        ]
        if self.best is not None:
            lines += ["", "the fastest, by the estimate:", f"  {' '.join(self.best.flags)}"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold; of the trials' reports the memory that they need, and the time."""
        trials = []
        for trial in self.trials:
            report = trial.outcome
            fields: dict[str, Any] = {"mesh": trial.sizes, "flags": trial.flags}
            if isinstance(report, Report):
                fields |= {"needed": report.memory.needed, "fits": report.memory.fits}
                fields |= {"step_seconds": trial.step_seconds, "bytes_sent": _sent(report)}
            else:
                fields |= {"impossible": report}
            trials.append(fields)
        return {"trials": trials}


def search_meshes(
    experiment: Experiment,
    target: Target,
    axes: Sequence[str],
    tell: Callable[[str], None] = lambda line: None,
    known: Report | None = None,
) -> MeshSearch:
    """Plans `experiment` with every division of its devices among `axes` and
    `lmlib.parallel.other_meshes.REST`; the other axes keep their sizes.

    Args:
      known: the plan of `experiment` as it is, if that was made.

    Raises:
      ValueError: as `lmlib.parallel.other_meshes.check_axes`.
    """
    check_axes(axes)
    trials = []
    for mesh in divisions(experiment.mesh, axes):
        changed = dataclasses.replace(experiment, mesh=mesh)
        sizes = {axis: mesh.shape[axis] for axis in (REST, *axes)}
        tell(f"trying {', '.join(f'{axis} {size}' for axis, size in sizes.items())}")
        try:
            changed.check()
        except ValueError as error:  # more devices along `expert` than experts, say
            trials.append(MeshTrial(sizes, str(error)))
            continue
        report = known if known and mesh == experiment.mesh else plan(changed, target)
        tell(report.memory.verdict)
        trials.append(MeshTrial(sizes, report))
    return MeshSearch(tuple(sorted(trials, key=lambda trial: trial.step_seconds or float("inf"))))


def _sent(report: Report) -> int | None:
    return None if report.collectives is None else report.collectives.bytes_sent_per_step


def _row(trial: MeshTrial) -> tuple[str, ...]:
    report = trial.outcome
    assert isinstance(report, Report)
    sent, estimate = _sent(report), report.estimate
    return (
        sizes_text(trial.sizes) or "1 device",
        f"{'' if report.memory.counted else 'at least '}{bytes_text(report.memory.needed)}",
        {True: "yes", False: "no", None: "unknown"}[report.memory.fits],
        f"{trial.step_seconds:.3f}" if trial.step_seconds else "",
        f"{estimate.mfu:.1%}" if estimate and trial.step_seconds else "",
        bytes_text(sent) if sent is not None else "",
    )
