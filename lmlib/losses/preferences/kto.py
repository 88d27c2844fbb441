"""Preferences from single answers, each labelled desirable or undesirable.

Shapes: B batch, S sequence.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lmlib.losses.objective import Metric
from lmlib.losses.pairs import PairSums, Responses
from lmlib.losses.preferences.rewards import ImplicitRewards, check_not_negative


@dataclasses.dataclass(frozen=True)
class KTO(ImplicitRewards):
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
    loss_metric = Metric("per answer", text="1 - σ(±β · (gain - KL)), weighted")
    units = "answers"
    compares_pairs = False
    reads_labels = True
    needs_whole_gain = True

    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative("desirable_weight", self.desirable_weight)
        check_not_negative("undesirable_weight", self.undesirable_weight)

    @property
    def metrics(self) -> Mapping[str, Metric]:
        found = dict(super().metrics)
        del found["reward_accuracy"]
        return {
            **found,
            "kl": Metric("nats per answer", True, "estimated KL from the reference"),
            "desirable": Metric("of answers", text="answers that are desirable"),
        }

    def means(self, per_unit: dict[str, Any]) -> dict[str, Any]:
        found, desirable = super().means(per_unit), per_unit["desirable"]
        for kind, share in (("chosen", desirable), ("rejected", 1 - desirable)):
            for name in (f"{kind}_reward", f"{kind}_log_probability", f"{kind}_tokens"):
                found[name] = per_unit[name] / (share + (share == 0))
        return found | {"reward_margin": found["chosen_reward"] - found["rejected_reward"]}

    def losses(self, rewards: Responses, pairs: PairSums) -> Float[Array, "b s"]:
        assert pairs.gains is not None and pairs.labels_BS is not None
        gain_BS = pairs.gains.chosen_BS + pairs.gains.rejected_BS  # one of them is 0
        sign_BS = jnp.where(pairs.labels_BS, 1.0, -1.0)
        weight_BS = jnp.where(pairs.labels_BS, self.desirable_weight, self.undesirable_weight)
        return weight_BS * jax.nn.sigmoid(-sign_BS * self.beta * (gain_BS - _kl(pairs)))

    def of_pairs(self, pairs: PairSums) -> dict[str, Float[Array, "b s"]]:
        if pairs.labels_BS is None:
            raise ValueError("KTO needs labels in batches: prepare the data with --labels")
        assert pairs.gains is not None
        good_BS = pairs.labels_BS.astype(pairs.gains.chosen_BS.dtype)

        def apart(of_answers: Responses) -> Responses:
            """The values of answers, as chosen if they are desirable and as rejected if not."""
            return Responses(good_BS * of_answers.chosen_BS, (1 - good_BS) * of_answers.chosen_BS)

        answers = pairs._replace(
            log_p=apart(pairs.log_p), gains=apart(pairs.gains), tokens=apart(pairs.tokens),
            likeliest=apart(pairs.likeliest), logits=apart(pairs.logits),
        )  # fmt: skip
        found = super().of_pairs(answers)
        del found["reward_accuracy"]
        return {**found, "kl": jnp.full_like(good_BS, _kl(pairs)), "desirable": good_BS}


def _kl(pairs: PairSums) -> Float[Array, ""]:
    """The estimate of KL(π ‖ π_ref) from the other answers of the whole batch."""
    return jnp.maximum(pairs.whole.rejected_gain / pairs.whole.pairs, 0)
