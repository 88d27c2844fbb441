"""Contrastive preference optimisation, without a reference model.

Shapes: B batch, S sequence.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxtyping import Array, Float

from lmlib.losses.objective import Metric, check_positive
from lmlib.losses.pairs import PairSums
from lmlib.losses.preferences.imitation import PairedImitation
from lmlib.losses.preferences.rewards import (
    SUMMED,
    check_smoothing,
    reward_metrics,
    reward_sums,
    smoothed,
    times,
)


@dataclasses.dataclass(frozen=True)
class CPO(PairedImitation):
    """-log σ(β · m) for each pair, plus the cross-entropy of the chosen responses.

    m = log π(chosen) - log π(rejected), sums over tokens. The cross-entropy is the mean over the
    tokens of all chosen responses. Source: Xu et al. 2024, arXiv:2401.08417, eq. 3.

    Reports the metrics of `DPO` with rewards of β · log π, and the metrics of `PairedImitation`.

    Args:
      beta: β, the weight of the margin.
      label_smoothing: see `DPO`.
      weight: of the cross-entropy.
    """

    rows_may_be_split = True
    loss_name = "CPO loss"

    beta: float = 0.1
    label_smoothing: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_smoothing(self.label_smoothing)
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight must not be negative or infinite, got {self.weight}")

    @property
    def preference_metrics(self) -> Mapping[str, Metric]:
        return reward_metrics("-log σ(reward margin), with label smoothing", SUMMED)

    def preferences(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        rewards = times(self.beta, pairs.log_p)
        margin_BS = rewards.chosen_BS - rewards.rejected_BS
        return reward_sums(smoothed(margin_BS, self.label_smoothing), rewards, pairs.log_p, pairs)
