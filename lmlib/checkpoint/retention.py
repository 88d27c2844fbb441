"""Which checkpoints stay when a new one is whole, as a policy for Orbax."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import checkpoint_managers as orbax

from lmlib.checkpoint import folders
from lmlib.checkpoint.manifest import DamagedCheckpointError, read_manifest, rewrite_metric


class Retention:
    """Keeps the newest `keep`, the multiples of `keep_every`, the `keep_best` best and one held.

    Attributes:
      held: a step that stays; looked at, as the ranks are, whenever a save begins.
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

    def policy(self) -> orbax.AnyPreservationPolicy:
        policies: list[orbax.PreservationPolicy] = [
            orbax.LatestN(self._keep),
            _Chosen(lambda steps: {self.held, *self._keep_steps}),
        ]
        if self._keep_every is not None:
            policies.append(orbax.EveryNSteps(self._keep_every))
        if self._keep_best:
            policies.append(_Chosen(self._best))
        return orbax.AnyPreservationPolicy(policies)

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
        if jax.process_index() == 0 and folder.is_dir():
            rewrite_metric(folder, folders.unfinished_folder(directory, step), metric)

    def read_ranks(self, directory: Path) -> None:
        """Ranks what is in `directory` as the manifests say; a damaged one has no rank."""
        for step in folders.steps_in(directory):
            with contextlib.suppress(DamagedCheckpointError):
                metric = read_manifest(directory / str(step)).metric
                if metric is not None:
                    self._metrics[step] = metric

    def _best(self, steps: Sequence[int]) -> set[int]:
        """The steps of the smallest metrics; of equals, the newer.

        Orbax's own `BestN` reads metrics from a file of its own, which no digest covers, and ranks
        NaN by chance.
        """
        ranked = sorted((self._metrics[step], -step) for step in steps if step in self._metrics)
        return {-negated for _, negated in ranked[: self._keep_best]}


@dataclasses.dataclass(frozen=True)
class _Chosen(orbax.PreservationPolicy):
    """Preserves the steps that `choose` names. Orbax's protocols cannot be checked at run time,
    hence `Any`."""

    choose: Callable[[Sequence[int]], set[Any]]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: orbax.PreservationContext
    ) -> Sequence[bool]:
        chosen = self.choose([info.step for info in checkpoints])
        return [info.step in chosen for info in checkpoints]
