"""Identity preference optimisation.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric, check_positive
from lmlib.losses.pairs import PairedObjective, PairSums
from lmlib.losses.preferences.rewards import (
    AGAINST_REFERENCE,
    per_token,
    reward_metrics,
    reward_sums,
    times,
)


@dataclasses.dataclass(frozen=True)
class IPO(PairedObjective):
    """(m - 1 / (2 β))² for each pair of responses, which keeps the margin m finite.

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17, where β is τ. As in TRL, m is the difference
    of means over tokens of log π - log π_ref, not of sums: the paper's authors used means.

    Reports the metrics of `DPO`, whose rewards are sums over tokens. The loss has no unit.

    Args:
      reference_from: see `PairedObjective`.
      beta: β; the margin's goal is 1 / (2 β) nats per token.
    """

    rows_may_be_split = True
    loss_name = "IPO loss"

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        text = "(margin per token - 1 / (2 β))²"
        return {**reward_metrics(text, AGAINST_REFERENCE), "loss": Metric("per pair", text=text)}

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        assert pairs.gains is not None
        means = per_token(pairs.gains, pairs.tokens)
        loss_BS = jnp.square(means.chosen_BS - means.rejected_BS - 1 / (2 * self.beta))
        return reward_sums(loss_BS, times(self.beta, pairs.gains), pairs.log_p, pairs)
