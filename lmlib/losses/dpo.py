"""Preference optimisation without a reward model.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping

import jax
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairedObjective, PairSums

_REWARD = "β times the log-probability of the {} response, minus the reference's"


@dataclasses.dataclass(frozen=True)
class DPO(PairedObjective):
    """Direct preference optimisation: -log σ(β · m) for each pair of responses.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7. See `lmlib.losses.pairs.Pairs` for the
    data. The margin m is the model's preference for the chosen response over the rejected one,
    minus the reference's:

        m = log π(chosen) - log π_ref(chosen) - log π(rejected) + log π_ref(rejected)

    With `label_smoothing` ε, the probability that a label is wrong, the loss is -(1 - ε) · log σ(β
    · m) - ε · log σ(-β · m).

    Reports means over pairs: `loss`, nats; `reward_margin`, β · m; `reward_accuracy`, the fraction
    of pairs with m > 0; `chosen_reward` and `rejected_reward`, β · (log π - log π_ref), whose
    difference is the margin; `chosen_log_probability` and `rejected_log_probability`, the model's
    log-probabilities in nats, summed over a response.

    Args:
      reference_from: see `PairedObjective`.
      beta: β, the weight of the margin.
      label_smoothing: ε, at least 0 and below 0.5.
    """

    rows_may_be_split = True
    loss_name = "DPO loss"

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta must be positive, got {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing must be at least 0 and below 0.5, got {self.label_smoothing}"
            )

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return {
            "loss": Metric("nats per pair", text="-log σ(reward margin), with label smoothing"),
            "reward_margin": Metric("nats per pair", True, "chosen minus rejected reward"),
            "reward_accuracy": Metric("of pairs", True, "pairs with a positive reward margin"),
            "chosen_reward": Metric("nats per response", text=_REWARD.format("chosen")),
            "rejected_reward": Metric("nats per response", text=_REWARD.format("rejected")),
            "chosen_log_probability": Metric("nats per response", text="sum over its tokens"),
            "rejected_log_probability": Metric("nats per response", text="sum over its tokens"),
        }

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        assert pairs.gains is not None
        margin_BS = self.beta * (pairs.gains.chosen_BS - pairs.gains.rejected_BS)
        loss_BS = -(1 - self.label_smoothing) * jax.nn.log_sigmoid(margin_BS)
        loss_BS -= self.label_smoothing * jax.nn.log_sigmoid(-margin_BS)
        return {
            "loss": loss_BS,
            "reward_margin": margin_BS,
            "reward_accuracy": (margin_BS > 0).astype(margin_BS.dtype),
            "chosen_reward": self.beta * pairs.gains.chosen_BS,
            "rejected_reward": self.beta * pairs.gains.rejected_BS,
            "chosen_log_probability": pairs.log_p.chosen_BS,
            "rejected_log_probability": pairs.log_p.rejected_BS,
        }
