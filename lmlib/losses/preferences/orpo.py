"""Odds ratio preference optimisation: fine-tuning and preferences at once, without a reference.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric, check_positive
from lmlib.losses.pairs import PairSums
from lmlib.losses.preferences.imitation import PairedImitation
from lmlib.losses.preferences.rewards import (
    PER_TOKEN,
    per_token,
    reward_metrics,
    reward_sums,
    times,
)


@dataclasses.dataclass(frozen=True)
class ORPO(PairedImitation):
    """-β · log σ(log odds(chosen) - log odds(rejected)), plus the chosen texts' cross-entropy.

    odds(y) = p / (1 - p), where log p is the mean log-probability of a token of the response. The
    cross-entropy is the mean over the tokens of all chosen documents, prompts included, as in TRL.
    Source: Hong et al. 2024, arXiv:2403.07691, eq. 4, 6 and 7; β is λ there.

    Reports the metrics of `DPO`, with means over the tokens of a response and rewards of β · log p;
    the metrics of `PairedImitation`; `log_odds_ratio`, the mean of log σ; and its argument,
    `log_odds_chosen`.

    Args:
      beta: β, the weight of the odds ratio.
    """

    rows_may_be_split = True
    loss_name = "ORPO loss"
    learns_prompts = True

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)

    @property
    def preference_metrics(self) -> Mapping[str, Metric]:
        text = "log odds of the chosen response, minus the rejected one's"
        return {
            **reward_metrics("-β · log σ(difference of log odds)", PER_TOKEN, "mean"),
            "log_odds_ratio": Metric("nats per pair", text=f"log σ({text})"),
            "log_odds_chosen": Metric("nats per pair", text=text),
        }

    def preferences(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        means = per_token(pairs.log_p, pairs.tokens)
        difference_BS = _log_odds(means.chosen_BS) - _log_odds(means.rejected_BS)
        ratio_BS = jax.nn.log_sigmoid(difference_BS)
        found = reward_sums(-self.beta * ratio_BS, times(self.beta, means), means, pairs)
        return {**found, "log_odds_ratio": ratio_BS, "log_odds_chosen": difference_BS}


def _log_odds(log_p_BS: Float[Array, "b s"]) -> Float[Array, "b s"]:
    """log(p / (1 - p)); finite for p = 1, which is also where no pair ends."""
    below_BS = jnp.where(log_p_BS < 0, log_p_BS, -jnp.finfo(log_p_BS.dtype).tiny)
    return below_BS - jax.nn.log1mexp(-below_BS)
