"""Identity preference optimisation.

Shapes: B batch, S sequence.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairSums, Responses
from lmlib.losses.preferences.rewards import ImplicitRewards


@dataclasses.dataclass(frozen=True)
class IPO(ImplicitRewards):
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
    loss_metric = Metric("per pair", text="(margin per token - 1 / (2 β))²")

    def losses(self, rewards: Responses, pairs: PairSums) -> Float[Array, "b s"]:
        assert pairs.gains is not None
        margin_BS = pairs.gains.per_token(pairs.tokens).margin_BS
        return jnp.square(margin_BS - 1 / (2 * self.beta))
