"""Preference optimisation without a reward model.

Shapes: B batch, S sequence.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairSums, Responses
from lmlib.losses.preferences.rewards import ImplicitRewards, check_smoothing, smoothed


@dataclasses.dataclass(frozen=True)
class DPO(ImplicitRewards):
    """Direct preference optimisation: -log σ(β · m) for each pair of responses.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7. See `lmlib.losses.pairs.Pairs` for the
    data. The margin m is the model's preference for the chosen response over the rejected one,
    minus the reference's:

        m = log π(chosen) - log π_ref(chosen) - log π(rejected) + log π_ref(rejected)

    With `label_smoothing` ε, the probability that a label is wrong, the loss is -(1 - ε) · log σ(β
    · m) - ε · log σ(-β · m). With `robust` it is (-(1 - ε) · log σ(β · m) + ε · log σ(-β · m)) /
    (1 - 2 ε), which without wrong labels would have the same mean (Chowdhury et al. 2024,
    arXiv:2403.00409, eq. 12).

    Reports means over pairs: `loss`, nats; `reward_margin`, β · m; `reward_accuracy`, the fraction
    of pairs with m > 0; `chosen_reward` and `rejected_reward`, β · (log π - log π_ref), whose
    difference is the margin; `chosen_log_probability` and `rejected_log_probability`, the model's
    log-probabilities in nats, summed over a response; `chosen_tokens` and `rejected_tokens`. These
    are means over tokens: `chosen_logit` and `rejected_logit`, of the mean over the vocabulary, and
    `token_accuracy`, the fraction of chosen tokens that the model found likeliest.

    Args:
      reference_from: see `PairedObjective`.
      beta: β, the weight of the margin.
      label_smoothing: ε, at least 0 and below 0.5.
      robust: True for the loss that corrects wrong labels in the mean.
    """

    rows_may_be_split = True
    loss_name = "DPO loss"

    loss_metric = Metric("nats per pair", text="-log σ(reward margin), with label smoothing")

    label_smoothing: float = 0.0
    robust: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smoothing(self.label_smoothing)

    def losses(self, rewards: Responses, pairs: PairSums) -> Float[Array, "b s"]:
        loss_BS = smoothed(rewards.margin_BS, self.label_smoothing)
        if self.robust:
            wrong_BS = self.label_smoothing * jax.nn.log_sigmoid(-rewards.margin_BS)
            loss_BS = (loss_BS + 2 * wrong_BS) / (1 - 2 * self.label_smoothing)
        return loss_BS
