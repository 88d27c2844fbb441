"""Preference optimisation without a reward model.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping

import jax
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric, check_positive
from lmlib.losses.pairs import PairedObjective, PairSums
from lmlib.losses.preferences.rewards import (
    AGAINST_REFERENCE,
    check_smoothing,
    reward_metrics,
    reward_sums,
    smoothed,
    times,
)


@dataclasses.dataclass(frozen=True)
class DPO(PairedObjective):
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

    beta: float = 0.1
    label_smoothing: float = 0.0
    robust: bool = False

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        check_smoothing(self.label_smoothing)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return reward_metrics("-log σ(reward margin), with label smoothing", AGAINST_REFERENCE)

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        assert pairs.gains is not None
        rewards = times(self.beta, pairs.gains)
        margin_BS = rewards.chosen_BS - rewards.rejected_BS
        loss_BS = smoothed(margin_BS, self.label_smoothing)
        if self.robust:
            wrong_BS = self.label_smoothing * jax.nn.log_sigmoid(-margin_BS)
            loss_BS = (loss_BS + 2 * wrong_BS) / (1 - 2 * self.label_smoothing)
        return reward_sums(loss_BS, rewards, pairs.log_p, pairs)
