"""The base class of losses that compare the implicit rewards of responses.

Shapes: B batch, S sequence.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import jax
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric, check_positive
from lmlib.losses.pairs import PairedObjective, PairSums, Responses


@dataclasses.dataclass(frozen=True)
class ImplicitRewards(PairedObjective):
    """A loss of rewards: β times log π - log π_ref of a response, or log π without a reference.

    A subclass defines `losses`, `loss_metric`, and `per_token = True` if rewards and reported
    log-probabilities are means over the tokens of a response instead of sums.

    Reports the metrics that `lmlib.losses.dpo.DPO` lists.
    """

    loss_metric: ClassVar[Metric]  # the unit and the meaning of `losses`
    per_token = False

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)

    @abstractmethod
    def losses(self, rewards: Responses, pairs: PairSums) -> Float[Array, "b s"]:
        """Returns the loss of each pair, at its last token."""

    @property
    def metrics(self) -> Mapping[str, Metric]:
        log_p = "mean log-probability of a token of" if self.per_token else "log-probability of"
        reference = ", minus the reference's" if self.uses_reference else ""
        reward = f"β times the {log_p} the {{}} response{reference}"
        over_tokens = f"{'mean' if self.per_token else 'sum'} over its tokens"
        likeliest = "tokens of chosen responses that were likeliest"
        return {
            "loss": self.loss_metric,
            "reward_margin": Metric("nats per pair", True, "chosen minus rejected reward"),
            "reward_accuracy": Metric("of pairs", True, "pairs with a positive reward margin"),
            "chosen_reward": Metric("nats per response", text=reward.format("chosen")),
            "rejected_reward": Metric("nats per response", text=reward.format("rejected")),
            "chosen_log_probability": Metric("nats per response", text=over_tokens),
            "rejected_log_probability": Metric("nats per response", text=over_tokens),
            "chosen_tokens": Metric("per response"),
            "rejected_tokens": Metric("per response"),
            "chosen_logit": Metric("per token", text="mean over the vocabulary"),
            "rejected_logit": Metric("per token", text="mean over the vocabulary"),
            "token_accuracy": Metric("of tokens", text=likeliest),
        }

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        log_p = pairs.mean_log_p if self.per_token else pairs.log_p
        rewards = (log_p if pairs.gains is None else pairs.gains).times(self.beta)
        return {
            "loss": self.losses(rewards, pairs),
            "reward_margin": rewards.margin_BS,
            "reward_accuracy": (rewards.margin_BS > 0).astype(rewards.margin_BS.dtype),
            "chosen_reward": rewards.chosen_BS,
            "rejected_reward": rewards.rejected_BS,
            "chosen_log_probability": log_p.chosen_BS,
            "rejected_log_probability": log_p.rejected_BS,
            "chosen_tokens": pairs.tokens.chosen_BS,
            "rejected_tokens": pairs.tokens.rejected_BS,
            "chosen_logit": pairs.logits.chosen_BS,
            "rejected_logit": pairs.logits.rejected_BS,
            "token_accuracy": pairs.likeliest.chosen_BS,
        }


def check_not_negative(name: str, value: float) -> None:
    """Raises ValueError if a setting is negative or infinite."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must not be negative or infinite, got {value}")


def smoothed(margin_BS: Float[Array, "b s"], label_smoothing: float) -> Float[Array, "b s"]:
    """-(1 - ε) · log σ(margin) - ε · log σ(-margin)."""
    loss_BS = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin_BS)
    return loss_BS - label_smoothing * jax.nn.log_sigmoid(-margin_BS)


def check_smoothing(label_smoothing: float) -> None:
    """Raises ValueError if the probability of a wrong label is not at least 0 and below 0.5."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5, got {label_smoothing}")
