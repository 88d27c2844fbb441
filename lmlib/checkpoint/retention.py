"""Which checkpoints stay when a new one is whole, as a policy for Orbax."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from orbax.checkpoint import checkpoint_managers as orbax


def preservation_policy(
    keep: int, keep_every: int | None, keep_best: int, metrics: Mapping[int, float]
) -> orbax.AnyPreservationPolicy:
    """Keeps the newest `keep`, the multiples of `keep_every`, and the `keep_best` best.

    Args:
      metrics: of the steps that have one, smaller is better; looked at whenever a save begins.

    Raises:
      ValueError: if `keep` or `keep_every` is less than 1, or `keep_best` less than 0.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would delete every checkpoint: keep at least 1")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every={keep_every} must be a number of steps, at least 1, or None")
    if keep_best < 0:
        raise ValueError(f"keep_best={keep_best} must be 0 or more")
    policies: list[orbax.PreservationPolicy] = [orbax.LatestN(keep)]
    if keep_every is not None:
        policies.append(orbax.EveryNSteps(keep_every))
    if keep_best:
        policies.append(_Best(keep_best, metrics))
    return orbax.AnyPreservationPolicy(policies)


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


def finite_or_none(metric: Any) -> float | None:
    """The metric as the manifest keeps it: `None` for NaN and infinity, which have no rank."""
    value = None if metric is None else float(metric)
    return value if value is not None and abs(value) < float("inf") else None
