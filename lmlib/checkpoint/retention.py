"""Which checkpoints stay when a new one is whole, as a policy for Orbax."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orbax.checkpoint import checkpoint_managers as orbax


def preservation_policy(
    keep: int,
    keep_every: int | None,
    keep_best: int,
    metrics: Mapping[int, float],
    held: Collection[int],
) -> orbax.AnyPreservationPolicy:
    """Keeps the newest `keep`, the multiples of `keep_every`, the `keep_best` best, and `held`.

    Args:
      metrics: of the steps that have one, smaller is better; looked at whenever a save begins.
      held: steps; looked at whenever a save begins.

    Raises:
      ValueError: if `keep` or `keep_every` is less than 1, or `keep_best` less than 0.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would delete every checkpoint: keep at least 1")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every={keep_every} must be a number of steps, at least 1, or None")
    if keep_best < 0:
        raise ValueError(f"keep_best={keep_best} must be 0 or more")
    policies: list[orbax.PreservationPolicy] = [orbax.LatestN(keep), _Held(held)]
    if keep_every is not None:
        policies.append(orbax.EveryNSteps(keep_every))
    if keep_best:
        policies.append(_Best(keep_best, metrics))
    return orbax.AnyPreservationPolicy(policies)


@dataclasses.dataclass(frozen=True)
class _Held(orbax.PreservationPolicy):
    """Preserves the checkpoints of given steps. Orbax's `CustomSteps` takes them once."""

    steps: Collection[int]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: orbax.PreservationContext
    ) -> Sequence[bool]:
        return [info.step in self.steps for info in checkpoints]


@dataclasses.dataclass(frozen=True)
class _Best(orbax.PreservationPolicy):
    """Preserves the checkpoints of the smallest metrics; of equals, the newer.

    Orbax's own `BestN` reads metrics from a file of its own, which no digest covers, and ranks NaN
    by chance. Orbax's protocols cannot be checked at run time, hence `Any`.
    """

    number: int
    metrics: Mapping[int, float]

    def should_preserve(
        self, checkpoints: Sequence[Any], *, context: orbax.PreservationContext
    ) -> Sequence[bool]:
        ranked = sorted(
            (self.metrics[info.step], -info.step)
            for info in checkpoints
            if info.step in self.metrics
        )
        best = {-negated for _, negated in ranked[: self.number]}
        return [info.step in best for info in checkpoints]
