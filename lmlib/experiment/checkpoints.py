"""When a run is saved, and which of its checkpoints stay."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """When a run is saved, and which of its checkpoints stay.

    Args:
      every: steps from one checkpoint to the next; the last step is saved too.
      keep: how many checkpoints stay, the newest.
      keep_every: besides, those of every so many steps; `None` for none.
      keep_best: besides, how many of the best.
      best_by: the metric that ranks checkpoints, of `Experiment.evaluation_metrics`.
      best_is_highest: whether more of it is better.
      tolerated_failures: how many saves in a row may fail, the disk being full say, before the run
        stops.
    """

    every: int = 1_000
    keep: int = 3
    keep_every: int | None = None
    keep_best: int = 0
    best_by: str = "evaluation_loss"
    best_is_highest: bool = False
    tolerated_failures: int = 2
