"""Losses of pairs that also imitate the chosen response.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairSums
from lmlib.losses.preferences.rewards import ImplicitRewards


@dataclasses.dataclass(frozen=True)
class PairedImitation(ImplicitRewards):
    """A loss of rewards, plus a weighted cross-entropy of the chosen responses.

    The first is a mean over the pairs of a batch, the second over the targets of all its chosen
    responses (`PairSums.chosen`), as in TRL.

    Reports `loss`, the sum of both; `preference_loss`; `cross_entropy`, nats per target;
    `chosen_targets`, per pair; and the other metrics of `ImplicitRewards`.
    """

    uses_reference = False
    weight = 1.0  # of the cross-entropy

    @property
    def metrics(self) -> Mapping[str, Metric]:
        text = f"preference loss + {self.weight:g} · cross-entropy"
        return {
            **super().metrics,
            "loss": Metric("nats", text=text),
            "preference_loss": self.loss_metric,
            "cross_entropy": Metric("nats per target", text="-log p of the chosen responses"),
            "chosen_targets": Metric("per pair", text="targets of the cross-entropy"),
        }

    def means(self, per_unit: dict[str, Any]) -> dict[str, Any]:
        targets = per_unit["chosen_targets"]
        cross_entropy = per_unit["cross_entropy"] / (targets + (targets == 0))
        loss = per_unit["preference_loss"] + self.weight * cross_entropy
        return {**super().means(per_unit), "cross_entropy": cross_entropy, "loss": loss}

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        found, chosen, whole = super().of_pairs(pairs), pairs.chosen, pairs.whole
        of_pair_BS = chosen.nats_BS * (whole.pairs / whole.chosen_targets)
        return {
            **found,
            "loss": found["loss"] + self.weight * of_pair_BS,
            "preference_loss": found["loss"],
            "cross_entropy": chosen.nats_BS,
            "chosen_targets": chosen.targets_BS,
        }
