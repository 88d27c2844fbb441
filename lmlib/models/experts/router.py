"""The router: chooses experts and shares (routing weights) for each token.

Shapes: B batch, S sequence, E embed, X experts (as choices), K choices of a token, G groups.
"""

from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.forward_context import ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.part import ActivationNames, AuxOutputs, Part
from lmlib.models.scan import CHOICES
from lmlib.models.weights import Constant, fan_in, fill, weight, zeros
from lmlib.parallel.collectives import shard_map
from lmlib.parallel.layout import partition

M = TypeVar("M")

SCORES = ("softmax", "sigmoid")
BALANCES = ("row", "batch")


class Routing(NamedTuple):
    """The experts and shares of each token; no expert is chosen twice for a token."""

    choices_BSK: Int32[Array, "b s k"]
    shares_BSK: Float[Array, "b s k"]
    aux: AuxOutputs


class Router(Part):
    """Chooses the `top` experts with the highest scores, in float32.

    Reports the losses `router_z`, the squared log-sum-exp of the logits (arXiv:2202.08906, eq. 5),
    and `router_balance`, X · Σ f · p over the experts, where f is an expert's fraction of all
    choices and p its mean score (arXiv:2101.03961, eq. 4), and the statistic `router_entropy`, in
    nats.

    With `balance` "row", f is computed over the token's row (DeepSeek-AI 2024, arXiv:2412.19437,
    eq. 17). With "batch", it is the f of the whole previous batch, so that the gradient is exact
    across microbatches.

    Args:
      scores: "softmax" over the logits, or "sigmoid" of each logit.
      normalized: True if a token's shares add up to `scale`; otherwise they are `scale` · scores.
        `None`: True if `top` is above 1, since the router of a single share of 1 gets no
        gradient.
      groups, top_groups: each token chooses from the `top_groups` of `groups` groups of experts
        whose two best scores have the largest sum (arXiv:2412.19437, §2.1.2).
      correction_rate: step size of corrections of the choice, not the shares, which grow for
        experts with fewer tokens than the mean, and shrink for others (arXiv:2408.15664,
        algorithm 1).
    """

    rows_may_be_split = True

    names = ActivationNames(scopes=("router",))

    top: int = eqx.field(static=True)
    scores: str = eqx.field(static=True)
    normalized: bool = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    top_groups: int = eqx.field(static=True)
    correction_rate: float | None = eqx.field(static=True)
    experts: int = eqx.field(static=True)
    logits: Float[Array, "embed choice"] = weight(fan_in("embed"), dtype="float32")
    bias: Float[Array, "choice"] | None = weight(zeros, dtype="float32")
    correction: Float[Array, "choice"] | None = weight(zeros, dtype="float32", gradient=False)
    load: Float[Array, "choice"] | None = weight(
        lambda self: Constant(1 / self.experts), dtype="float32", gradient=False
    )

    def __init__(
        self,
        embed: int,
        experts: int,
        top: int,
        scores: str = "softmax",
        normalized: bool | None = None,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        bias: bool = False,
        correction_rate: float | None = None,
        balance: str = "row",
        *,
        key: PRNGKeyArray,
    ):
        _check(experts, top, scores, groups, top_groups, balance)
        self.experts, self.top, self.scores = experts, top, scores
        self.normalized, self.scale = top > 1 if normalized is None else normalized, scale
        self.groups, self.top_groups, self.correction_rate = groups, top_groups, correction_rate
        sizes = {"embed": embed, "choice": experts}
        absent = [] if bias else ["bias"]
        absent += ["correction"] if correction_rate is None else []
        absent += ["load"] if balance == "row" else []
        fill(self, key, absent, **sizes)

    @jax.named_scope("router")
    def __call__(self, x_BSE: Float[Array, "b s embed"], context: ForwardContext) -> Routing:
        """Routes tokens, with the same result on every device along `tensor`; sends nothing."""
        logits_BSX = matmul("bse,ex->bsx", x_BSE.astype(jnp.float32), self.logits)
        logits_BSX = logits_BSX if self.bias is None else logits_BSX + self.bias
        if self.scores == "softmax":
            scores_BSX = probability_BSX = jax.nn.softmax(logits_BSX)
        else:
            scores_BSX = jax.nn.sigmoid(logits_BSX)
            probability_BSX = scores_BSX / jnp.sum(scores_BSX, axis=-1, keepdims=True)
        ranked_BSX = jax.lax.stop_gradient(scores_BSX)
        ranked_BSX = ranked_BSX if self.correction is None else ranked_BSX + self.correction
        choices_BSK = _best(ranked_BSX, self.top, self.groups, self.top_groups)
        choices_BSK = checkpoint_name(choices_BSK, CHOICES)
        is_chosen_BSKX = choices_BSK[..., None] == jnp.arange(self.experts, dtype=jnp.int32)
        shares_BSK = jnp.sum(jnp.where(is_chosen_BSKX, scores_BSX[..., None, :], 0), axis=-1)
        if self.normalized:
            shares_BSK /= jnp.sum(shares_BSK, axis=-1, keepdims=True) + 1e-20
        chosen_BSX = jnp.sum(is_chosen_BSKX, axis=-2, dtype=jnp.float32)
        aux = self._reports(logits_BSX, probability_BSX, chosen_BSX, context)
        return Routing(choices_BSK, self.scale * shares_BSK, aux)

    def _reports(
        self, logits_BSX: Array, probability_BSX: Array, chosen_BSX: Array, context: ForwardContext
    ) -> AuxOutputs:
        squared_BS = jnp.square(jax.nn.logsumexp(logits_BSX, axis=-1))
        log_BSX = jnp.log(jnp.maximum(probability_BSX, 1e-30))
        entropy_BS = -jnp.sum(jax.lax.stop_gradient(probability_BSX * log_BSX), axis=-1)
        if self.load is None:
            load_BSX = _row_means(chosen_BSX / self.top, context)
        else:
            load_BSX = jnp.broadcast_to(self.load, chosen_BSX.shape)
        balance_BS = self.experts * jnp.sum(load_BSX * probability_BSX, axis=-1)
        total, losses = context.total, {"router_balance": balance_BS, "router_z": squared_BS}
        losses = {name: total(each_BS) for name, each_BS in losses.items()}
        return AuxOutputs(losses, {"router_entropy": total(entropy_BS)}, total(chosen_BSX))

    @property
    def gradient_problem(self) -> str | None:
        if not self.normalized or self.top > 1 or self.experts == 1:
            return None
        return (
            "top=1 with normalized shares: the share of a single expert is always 1, whatever the "
            "router computes; use normalized=False, or top=2 or more"
        )

    def updated(self, tallies_X: Float[Array, "choice"]) -> "Router":
        """See `Part.updated`; the tallies are the numbers of tokens of each expert."""
        moved = self
        if self.correction is not None and self.correction_rate is not None:
            moves_X = self.correction_rate * jnp.sign(jnp.mean(tallies_X) - tallies_X)
            moved = eqx.tree_at(lambda router: router.correction, moved, self.correction + moves_X)
        if self.load is not None:
            load_X = tallies_X / jnp.maximum(jnp.sum(tallies_X), 1)
            moved = eqx.tree_at(lambda router: router.load, moved, load_X)
        return moved


def _check(experts: int, top: int, scores: str, groups: int, top_groups: int, balance: str) -> None:
    for name, value, known in (("scores", scores, SCORES), ("balance", balance, BALANCES)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if experts < 1 or not 1 <= top <= experts:
        raise ValueError(f"a token goes to 1 to {experts} of {experts} experts, got top={top}")
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        raise ValueError(
            f"{experts} experts do not divide into groups={groups} of which each token has "
            f"top_groups={top_groups}; use a divisor of {experts}, and 1 to {groups} of them"
        )
    size = experts // groups
    if top > top_groups * size or (groups > 1 and size < 2):
        raise ValueError(
            f"groups={groups} have {size} experts each; each needs at least two, and "
            f"top_groups={top_groups} of them at least top={top}"
        )


def _row_means(x_BSX: Float[Array, "b s x"], context: ForwardContext) -> Any:
    """Returns each row's mean over positions that count, repeated at all positions."""
    if context.counts_BS is None:
        means_BX = jnp.mean(x_BSX, axis=1, keepdims=True)
    else:
        counts_BSX = context.counts_BS[..., None]
        total_BX = jnp.sum(jnp.where(counts_BSX, x_BSX, 0), axis=1, keepdims=True)
        means_BX = total_BX / jnp.maximum(jnp.sum(counts_BSX, axis=1, keepdims=True), 1)
    return jnp.broadcast_to(means_BX, x_BSX.shape)


def _best(
    scores_BSX: Float[Array, "b s x"], top: int, groups: int, top_groups: int
) -> Int32[Array, "b s k"]:
    """Returns each token's `top` experts within its `top_groups` best groups, the best first.

    It runs on each device's part, since XLA does not split `top_k` on CPUs.
    """

    def on_device(scores_BSX: Array) -> Array:
        return jax.lax.top_k(_of_best_groups(scores_BSX, groups, top_groups), top)[1]

    layout = partition(("batch", "seq", None))
    return shard_map(on_device, inputs=(layout,), outputs=layout)(scores_BSX)


def _of_best_groups(scores_BSX: Array, groups: int, top_groups: int) -> Array:
    """Sets the scores of experts outside a token's best groups to -inf."""
    if groups == top_groups:
        return scores_BSX
    *_, X = scores_BSX.shape
    scores_BSGX = jnp.reshape(scores_BSX, (*scores_BSX.shape[:-1], groups, X // groups))
    best_BSG2, _ = jax.lax.top_k(scores_BSGX, 2)
    _, kept_BSG = jax.lax.top_k(jnp.sum(best_BSG2, axis=-1), top_groups)
    is_kept_BSG = jnp.any(kept_BSG[..., None] == jnp.arange(groups, dtype=jnp.int32), axis=-2)
    of_kept_BSGX = jnp.where(is_kept_BSG[..., None], scores_BSGX, -jnp.inf)
    return jnp.reshape(of_kept_BSGX, scores_BSX.shape)


def without_load(model: M) -> M:
    """Removes the previous step's load, which affects no outputs, from the routers of `model`."""

    def forgetful(part: object) -> object:
        if not isinstance(part, Router) or part.load is None:
            return part
        return eqx.tree_at(lambda router: router.load, part, None)

    return jax.tree.map(forgetful, model, is_leaf=lambda part: isinstance(part, Router))
