"""The loss of reward models.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.data.batch import Batch
from lmlib.losses.features import features
from lmlib.losses.objective import LossSums, Metric, Objective
from lmlib.losses.pairs import Pairs
from lmlib.losses.preferences.rewards import check_not_negative
from lmlib.models.reward import RewardModel


@dataclasses.dataclass(frozen=True)
class BradleyTerry(Objective):
    """-log σ(r(chosen) - r(rejected)) for each pair of responses; r is the reward of a text.

    Source: Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1. The reward is
    `RewardModel.scores` at the last token. Without dropout.

    Reports means over pairs: `loss`, nats; `accuracy`, the fraction of pairs whose chosen response
    has the higher reward; `margin`, the difference; `chosen_reward` and `rejected_reward`.

    Args:
      center: weight of (r(chosen) + r(rejected))², which keeps rewards near zero (Eisenstein et al.
        2023, arXiv:2312.09244, eq. 2); TRL's `center_rewards_coefficient`.
    """

    rows_may_be_split = True
    loss_name = "reward loss"
    units = "pairs"
    compares_pairs = True

    center: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative("center", self.center)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return {
            "loss": Metric("nats per pair", text="-log σ(margin)"),
            "accuracy": Metric("of pairs", True, "pairs with a positive margin"),
            "margin": Metric("per pair", True, "chosen minus rejected reward"),
            "chosen_reward": Metric("per response"),
            "rejected_reward": Metric("per response"),
        }

    def check(self, model: Any, reference_model: Any, trained: Set[str] | None) -> None:
        if not isinstance(model, RewardModel):
            raise ValueError(
                f"{type(self).__name__} trains the score of a reward model: make the model with "
                "lmlib.models.reward.reward_model(of=…)"
            )

    def count(self, batch: Batch) -> Int32[Array, ""]:
        return jnp.sum(Pairs.of(batch).counted_BS, dtype=jnp.int32)

    def sums(
        self,
        model: Any,
        reference_model: Any,
        batch: Batch,
        compute: Compute,
        key: PRNGKeyArray | None = None,
    ) -> LossSums:
        found = features(model, batch, compute)
        with jax.named_scope("loss"):
            pairs = Pairs.of(batch)
            rewards = pairs.last(model.scores(found.h_BSE, compute))
            margin_BS = rewards.margin_BS
            sum_BS = rewards.chosen_BS + rewards.rejected_BS
            values = {
                "loss": -jax.nn.log_sigmoid(margin_BS) + self.center * jnp.square(sum_BS),
                "accuracy": (margin_BS > 0).astype(margin_BS.dtype),
                "margin": margin_BS,
                "chosen_reward": rewards.chosen_BS,
                "rejected_reward": rewards.rejected_BS,
            }
            sums = {name: pairs.total(each_BS) for name, each_BS in values.items()}
        return LossSums(sums["loss"], jax.lax.stop_gradient(sums), found.aux)
