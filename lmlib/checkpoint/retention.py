"""Retention of checkpoints: which ones stay when a new one is complete."""

import contextlib
import math
from collections.abc import Collection, Sequence
from pathlib import Path

from lmlib.checkpoint import folders
from lmlib.checkpoint.failures import DamagedCheckpointError
from lmlib.checkpoint.manifest import read_manifest


class Retention:
    """Keeps the newest `keep`, multiples of `keep_every`, the `keep_best` best and one held step.

    Attributes:
      held: a step to keep.
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
        self._metrics: dict[int, float] = {}  # by step, smaller is better
        self._keep, self._keep_every, self._keep_best = keep, keep_every, keep_best
        self._keep_steps = frozenset(keep_steps)

    def outdated(self, steps: Sequence[int]) -> list[int]:
        """Returns the `steps` to delete, in order."""
        kept = {*steps[-self._keep :], self.held, *self._keep_steps, *self._best(steps)}
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0}
        return [step for step in steps if step not in kept]

    def rank(self, step: int, metric: float) -> bool:
        """Ranks `step` if the metric is finite; returns True if it is."""
        if finite := math.isfinite(metric):
            self._metrics[step] = metric
        return finite

    def read_ranks(self, directory: Path) -> None:
        """Reads the ranks of the steps in `directory` from their manifests; skips damaged ones."""
        for step in folders.steps_in(directory):
            with contextlib.suppress(DamagedCheckpointError):
                metric = read_manifest(directory / str(step)).metric
                if metric is not None:
                    self._metrics[step] = metric

    def _best(self, steps: Sequence[int]) -> set[int]:
        """Returns the steps with the smallest metrics; ties go to the newer one."""
        ranked = sorted((self._metrics[step], -step) for step in steps if step in self._metrics)
        return {-negated for _, negated in ranked[: self._keep_best]}
