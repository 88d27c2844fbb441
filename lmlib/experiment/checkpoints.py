"""Settings of a run's checkpoints."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """Settings for saving a run and for keeping its checkpoints.

    Args:
      every: steps from one checkpoint to the next; the last step is saved too.
      keep: the number of newest checkpoints that are kept.
      keep_every: also keeps the checkpoints of these multiples of steps; `None` for none.
      keep_best: also keeps this number of the best.
      best_by: the metric that ranks checkpoints, of `Experiment.evaluation_metrics`.
      best_is_highest: True if higher is better.
      tolerated_failures: consecutive saves that may fail, for example on a full disk, before the
        run stops.
    """

    every: int = 1_000
    keep: int = 3
    keep_every: int | None = None
    keep_best: int = 0
    best_by: str = "evaluation_loss"
    best_is_highest: bool = False
    tolerated_failures: int = 2
