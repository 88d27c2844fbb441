"""Simple preference optimisation, without a reference model.

Shapes: B batch, S sequence.
"""

import dataclasses

from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairSums, Responses
from lmlib.losses.preferences.rewards import (
    ImplicitRewards,
    check_not_negative,
    check_smoothing,
    smoothed,
)


@dataclasses.dataclass(frozen=True)
class SimPO(ImplicitRewards):
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
    loss_metric = Metric("nats per pair", text="-log σ(reward margin - γ), with label smoothing")
    uses_reference = False
    per_token = True

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing(self.label_smoothing)
        check_not_negative("gamma", self.gamma)

    def losses(self, rewards: Responses, pairs: PairSums) -> Float[Array, "b s"]:
        return smoothed(rewards.margin_BS - self.gamma, self.label_smoothing)
