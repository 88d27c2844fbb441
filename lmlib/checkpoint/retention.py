"""Which checkpoints stay when a new one is whole."""

import contextlib
import math
from collections.abc import Collection, Sequence
from pathlib import Path

import jax

from lmlib.checkpoint import folders
from lmlib.checkpoint.manifest import DamagedCheckpointError, read_manifest, rewrite_metric
from lmlib.checkpoint.removal import remove


class Retention:
    """Keeps the newest `keep`, the multiples of `keep_every`, the `keep_best` best and one held.

    Attributes:
      held: a step that stays.
    """

    held: int | None

    def __init__(
        self, keep: int, keep_every: int | None, keep_best: int, keep_steps: Collection[int] = ()
    ):
        """Raises ValueError if `keep` or `keep_every` is less than 1, or `keep_best` than 0."""
        if keep < 1:
            raise ValueError(f"keep={keep} would delete every checkpoint: keep at least 1")
        if keep_every is not None and keep_every < 1:
            raise ValueError(
                f"keep_every={keep_every} must be a number of steps, at least 1, or None"
            )
        if keep_best < 0:
            raise ValueError(f"keep_best={keep_best} must be 0 or more")
        self.held = None
        self._metrics: dict[int, float] = {}  # of the steps that have one, smaller is better
        self._keep, self._keep_every, self._keep_best = keep, keep_every, keep_best
        self._keep_steps = frozenset(keep_steps)

    def remove_old(self, directory: Path) -> None:
        """Removes the checkpoints in `directory` that need not stay."""
        steps = folders.steps_in(directory)
        kept = {*steps[-self._keep :], self.held, *self._keep_steps, *self._best(steps)}
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0}
        remove([directory / str(step) for step in steps if step not in kept])

    def rank(self, directory: Path, step: int, metric: float) -> None:
        """Ranks `step`, also in its manifest if it is there; what is not finite has no rank.

        Raises:
          DamagedCheckpointError: if its manifest cannot be read.
          OSError: if it cannot be written.
        """
        if not math.isfinite(metric):
            return
        self._metrics[step] = metric
        folder = directory / str(step)
        if jax.process_index() == 0 and folders.is_there(folder):
            rewrite_metric(folder, folders.unfinished_folder(directory, step, "ranked"), metric)

    def read_ranks(self, directory: Path) -> None:
        """Ranks what is in `directory` as the manifests say; a damaged one has no rank."""
        for step in folders.steps_in(directory):
            with contextlib.suppress(DamagedCheckpointError):
                metric = read_manifest(directory / str(step)).metric
                if metric is not None:
                    self._metrics[step] = metric

    def _best(self, steps: Sequence[int]) -> set[int]:
        """The steps of the smallest metrics; of equals, the newer."""
        ranked = sorted((self._metrics[step], -step) for step in steps if step in self._metrics)
        return {-negated for _, negated in ranked[: self._keep_best]}
