"""Settings and metrics that the losses of preferences share.

Shapes: B batch, S sequence.
"""

from collections.abc import Mapping

import jax
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairSums, Responses

AGAINST_REFERENCE = "β times the log-probability of the {} response, minus the reference's"
SUMMED = "β times the log-probability of the {} response"
PER_TOKEN = "β times the mean log-probability of a token of the {} response"


def reward_metrics(loss: str, reward: str, of_log_p: str = "sum") -> Mapping[str, Metric]:
    """Returns the metrics of `reward_sums`, after the loss.

    Args:
      loss, reward: texts about the loss, and about a reward with {} for the response.
      of_log_p: "sum" or "mean", over the tokens of a response.
    """
    return {
        "loss": Metric("nats per pair", text=loss),
        "reward_margin": Metric("nats per pair", True, "chosen minus rejected reward"),
        "reward_accuracy": Metric("of pairs", True, "pairs with a positive reward margin"),
        "chosen_reward": Metric("nats per response", text=reward.format("chosen")),
        "rejected_reward": Metric("nats per response", text=reward.format("rejected")),
        "chosen_log_probability": Metric("nats per response", text=f"{of_log_p} over its tokens"),
        "rejected_log_probability": Metric("nats per response", text=f"{of_log_p} over its tokens"),
        "chosen_tokens": Metric("per response"),
        "rejected_tokens": Metric("per response"),
        "chosen_logit": Metric("per token", text="mean over the vocabulary"),
        "rejected_logit": Metric("per token", text="mean over the vocabulary"),
        "token_accuracy": Metric(
            "of tokens", text="tokens of chosen responses that were likeliest"
        ),
    }


def reward_sums(
    loss_BS: Float[Array, "b s"], rewards: Responses, log_p: Responses, pairs: PairSums
) -> dict[str, Float[Array, "b s"]]:
    """Returns the values of `reward_metrics` for each pair."""
    margin_BS = rewards.chosen_BS - rewards.rejected_BS
    return {
        "loss": loss_BS,
        "reward_margin": margin_BS,
        "reward_accuracy": (margin_BS > 0).astype(margin_BS.dtype),
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


def times(beta: float, values: Responses) -> Responses:
    return Responses(*(beta * each_BS for each_BS in values))


def per_token(values: Responses, tokens: Responses) -> Responses:
    """The means over the tokens of each response."""
    return Responses(*(each / n for each, n in zip(values, tokens, strict=True)))


def smoothed(margin_BS: Float[Array, "b s"], label_smoothing: float) -> Float[Array, "b s"]:
    """-(1 - ε) · log σ(margin) - ε · log σ(-margin)."""
    loss_BS = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin_BS)
    return loss_BS - label_smoothing * jax.nn.log_sigmoid(-margin_BS)


def check_smoothing(label_smoothing: float) -> None:
    """Raises ValueError if the probability of a wrong label is not at least 0 and below 0.5."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be at least 0 and below 0.5, got {label_smoothing}")
