"""Preferences from single answers, each labelled desirable or undesirable.

Shapes: B batch, S sequence.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric, check_positive
from lmlib.losses.pairs import PairedObjective, PairSums, Responses
from lmlib.losses.preferences.rewards import AGAINST_REFERENCE, reward_metrics, reward_sums, times


@dataclasses.dataclass(frozen=True)
class KTO(PairedObjective):
    """Kahneman-Tversky optimisation: weight · (1 - σ(±β · (g - z))) for each answer.

    The sign is + for desirable answers, and g = log π(answer) - log π_ref(answer). z estimates
    KL(π ‖ π_ref): the mean over the batch of the same difference for answers of other rows, at
    least 0 and without a gradient. Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7. The
    data has the answer and the other one as a "pair" (`lmlib.data.stored.metadata.Content`). The
    batch of z is the whole one, so microbatches cost one more forward pass of both models.

    Reports means over answers: `loss`, without unit; `kl`, z in nats; and `desirable`, a fraction.
    The metrics of `DPO` are means over the desirable answers (`chosen_…`) or the undesirable ones
    (`rejected_…`), and the difference of both.

    Args:
      reference_from: see `PairedObjective`.
      beta: β, the weight of the difference.
      desirable_weight, undesirable_weight: of the losses of such answers. The paper's rule is that
        the ratio of weight times number of answers, desirable to undesirable, is 1 to 4/3.
    """

    rows_may_be_split = True
    loss_name = "KTO loss"
    units = "answers"
    compares_pairs = False
    reads_labels = True
    needs_whole_gain = True

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        check_positive("beta", self.beta)
        for name in ("desirable_weight", "undesirable_weight"):
            if not 0 <= (weight := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must not be negative or infinite, got {weight}")

    @property
    def metrics(self) -> Mapping[str, Metric]:
        text = "1 - σ(±β · (gain - KL)), weighted"
        found = dict(reward_metrics(text, AGAINST_REFERENCE))
        del found["reward_accuracy"]
        return {
            **found,
            "loss": Metric("per answer", text=text),
            "kl": Metric("nats per answer", True, "estimated KL from the reference"),
            "desirable": Metric("of answers", text="answers that are desirable"),
        }

    def means(self, per_unit: dict[str, Any]) -> dict[str, Any]:
        found, desirable = super().means(per_unit), per_unit["desirable"]
        for kind, share in (("chosen", desirable), ("rejected", 1 - desirable)):
            for name in (f"{kind}_reward", f"{kind}_log_probability", f"{kind}_tokens"):
                found[name] = per_unit[name] / (share + (share == 0))
        return found | {"reward_margin": found["chosen_reward"] - found["rejected_reward"]}

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        assert pairs.gains is not None
        if pairs.labels_BS is None:
            raise ValueError("KTO needs labels in batches: prepare the data with --labels")
        gain_BS, good_BS = pairs.gains.chosen_BS, pairs.labels_BS
        kl = jnp.maximum(pairs.whole.rejected_gain / pairs.whole.pairs, 0)
        sign_BS = jnp.where(good_BS, 1.0, -1.0)
        weight_BS = jnp.where(good_BS, self.desirable_weight, self.undesirable_weight)
        loss_BS = weight_BS * jax.nn.sigmoid(-sign_BS * self.beta * (gain_BS - kl))
        good_BS = good_BS.astype(gain_BS.dtype)

        def apart(of_answers: Responses) -> Responses:
            """The values of answers, as chosen if they are desirable and as rejected if not."""
            return Responses(good_BS * of_answers.chosen_BS, (1 - good_BS) * of_answers.chosen_BS)

        answers = pairs._replace(
            tokens=apart(pairs.tokens), likeliest=apart(pairs.likeliest), logits=apart(pairs.logits)
        )
        rewards = apart(times(self.beta, pairs.gains))
        found = reward_sums(loss_BS, rewards, apart(pairs.log_p), answers)
        del found["reward_accuracy"]
        return {**found, "kl": jnp.full_like(gain_BS, kl), "desirable": good_BS}
