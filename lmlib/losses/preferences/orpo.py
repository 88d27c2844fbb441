"""Odds ratio preference optimisation: fine-tuning and preferences at once, without a reference.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairSums, Responses
from lmlib.losses.preferences.imitation import PairedImitation


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
    loss_metric = Metric("nats per pair", text="-β · log σ(difference of log odds)")
    learns_prompts = True
    per_token = True

    @property
    def metrics(self) -> Mapping[str, Metric]:
        text = "log odds of the chosen response, minus the rejected one's"
        return {
            **super().metrics,
            "log_odds_ratio": Metric("nats per pair", text=f"log σ({text})"),
            "log_odds_chosen": Metric("nats per pair", text=text),
        }

    def losses(self, rewards: Responses, pairs: PairSums) -> Float[Array, "b s"]:
        return -self.beta * jax.nn.log_sigmoid(_log_odds_chosen(pairs))

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        chosen_BS = _log_odds_chosen(pairs)
        found = {"log_odds_ratio": jax.nn.log_sigmoid(chosen_BS), "log_odds_chosen": chosen_BS}
        return super().of_pairs(pairs) | found


def _log_odds_chosen(pairs: PairSums) -> Float[Array, "b s"]:
    """The log odds of the chosen response, minus the rejected one's."""
    means = pairs.mean_log_p
    return _log_odds(means.chosen_BS) - _log_odds(means.rejected_BS)


def _log_odds(log_p_BS: Float[Array, "b s"]) -> Float[Array, "b s"]:
    """log(p / (1 - p)); finite for p = 1, which is also where no pair ends."""
    below_BS = jnp.where(log_p_BS < 0, log_p_BS, -jnp.finfo(log_p_BS.dtype).tiny)
    return below_BS - jax.nn.log1mexp(-below_BS)
