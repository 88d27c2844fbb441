"""Contrastive preference optimisation, without a reference model.

Shapes: B batch, S sequence.
"""

import dataclasses

from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairSums, Responses
from lmlib.losses.preferences.imitation import PairedImitation
from lmlib.losses.preferences.rewards import check_not_negative, check_smoothing, smoothed


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

    loss_metric = Metric("nats per pair", text="-log σ(reward margin), with label smoothing")

    label_smoothing: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing(self.label_smoothing)
        check_not_negative("weight", self.weight)

    def losses(self, rewards: Responses, pairs: PairSums) -> Float[Array, "b s"]:
        return smoothed(rewards.margin_BS, self.label_smoothing)
