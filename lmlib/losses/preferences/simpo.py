"""Simple preference optimisation, without a reference model.

Shapes: B batch, S sequence.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxtyping import Array, Float

from lmlib.losses.objective import Metric, check_positive
from lmlib.losses.pairs import PairedObjective, PairSums
from lmlib.losses.preferences.rewards import (
    PER_TOKEN,
    check_smoothing,
    per_token,
    reward_metrics,
    reward_sums,
    smoothed,
    times,
)


@dataclasses.dataclass(frozen=True)
class SimPO(PairedObjective):
    """-log σ(β · m - γ) for each pair of responses.

    m is the mean log-probability of a token of the chosen response, minus that of the rejected one.
    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.

    Reports the metrics of `DPO`, with means over the tokens of a response: rewards are β times the
    mean log-probability. The reward margin does not contain γ.

    Args:
      beta: β, the weight of the margin; the paper's is 2.0 to 2.5 for most models.
      gamma: γ, the margin that a pair should reach, nats.
      label_smoothing: see `DPO`.
    """

    rows_may_be_split = True
    loss_name = "SimPO loss"
    uses_reference = False

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_smoothing(self.label_smoothing)
        if not 0 <= self.gamma < math.inf:
            raise ValueError(f"gamma must not be negative or infinite, got {self.gamma}")

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return reward_metrics("-log σ(reward margin - γ), with label smoothing", PER_TOKEN, "mean")

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        means = per_token(pairs.log_p, pairs.tokens)
        rewards = times(self.beta, means)
        margin_BS = rewards.chosen_BS - rewards.rejected_BS
        loss_BS = smoothed(margin_BS - self.gamma, self.label_smoothing)
        return reward_sums(loss_BS, rewards, means, pairs)
