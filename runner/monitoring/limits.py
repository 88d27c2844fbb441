"""Time limits for the phases of a run."""

import dataclasses

from runner.monitoring.phases import Phase


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that each phase may last without a break; a process that takes longer ends."""

    compile: float = 7_200.0
    step: float = 1_800.0
    data: float = 600.0  # the wait for one batch
    evaluation: float = 7_200.0
    checkpoint: float = 3_600.0  # the wait for a save

    def of(self, phase: Phase) -> float:
        return {
            Phase.COMPILE: self.compile,
            Phase.DATA: self.data,
            Phase.STEP: self.step,
            Phase.REPEATED: self.step,
            Phase.EVALUATION: self.evaluation,
            Phase.CHECKPOINT: self.checkpoint,
        }.get(phase, float("inf"))
