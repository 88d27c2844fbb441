"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437): latent attention, and mixtures of experts after
a few dense layers."""

import functools
import math
from collections.abc import Callable

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.sizes import head_sizes
from lmlib.models.families.table_values import table_values
from lmlib.models.part import Part
from lmlib.models.parts.latent_attention import LatentAttention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary
from lmlib.models.parts.rope_scaling import Yarn, yarn_amplitude
from lmlib.models.stack import Segment
from lmlib.models.weights import compiled, fold, residual_scale


def deepseek_v3(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    expert_mlp: int,
    experts: int = 256,
    top: int = 8,
    shared_experts: int = 1,
    dense_layers: int = 3,
    groups: int = 8,
    top_groups: int = 4,
    normalized: bool = True,
    share_scale: float = 2.5,
    correction_rate: float = 1e-3,
    head_dim: int = 128,
    rotary_dim: int = 64,
    value_dim: int = 128,
    latent: int = 512,
    query_latent: int | None = 1_536,
    rope_theta: float = 10_000.0,
    rope_scaling: Yarn | None = None,
    score_sharpness: float = 0.0,
    interleaved: bool = True,
    norm_epsilon: float = 1e-6,
    tied: bool = False,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """DeepSeek-V3 (§2.1), without the heads for further tokens.

    Args:
      vocab, embed, layers, heads: sizes.
      mlp, dense_layers: the first `dense_layers` layers have an mlp of this size and no experts.
      expert_mlp: size of each expert; the `shared_experts`, through which all tokens go, are one
        mlp of so many times this size.
      experts, top, groups, top_groups, normalized, correction_rate: as in
        `lmlib.models.experts.router.Router`, with the sigmoid of the logits as scores.
      share_scale: what a token's shares add up to, if they are `normalized`.
      head_dim, rotary_dim, value_dim, latent, query_latent: as in
        `lmlib.models.parts.latent_attention.LatentAttention`.
      rope_theta, rope_scaling: of rotary positions; DeepSeek-V3 has a `Yarn` whose amplitude is 1.
      score_sharpness: m, where with a `rope_scaling` all scores are multiplied by
        (0.1 m ln(factor) + 1)²; DeepSeek-V3 has 1.
      interleaved: as in `Rotary`.
      norm_epsilon: of all norms but those of latents, which have 1e-6.
      tied: one table embeds and unembeds.
      key: seed of the weights.

    Raises:
      ValueError: if a size is not positive, `rotary_dim` is odd, or a router's settings do not go
        together.
    """
    head_sizes(
        embed, heads, None, head_dim, vocab=vocab, layers=layers, mlp=mlp, expert_mlp=expert_mlp,
        rotary_dim=rotary_dim, value_dim=value_dim, latent=latent,
    )  # fmt: skip
    if not 0 <= dense_layers <= layers or shared_experts < 0:
        raise ValueError(
            f"dense_layers must be 0 to layers = {layers}, and shared_experts at least 0, got "
            f"{dense_layers} and {shared_experts}"
        )
    sharpness = (
        1.0 if rope_scaling is None else yarn_amplitude(rope_scaling.factor, score_sharpness)
    )
    rotary = Rotary(rotary_dim, rope_theta, rope_scaling, interleaved)
    scale = residual_scale(layers)
    attention = functools.partial(
        LatentAttention, embed, heads, head_dim, rotary_dim, value_dim, latent, query_latent,
        rotary, sharpness**2 / math.sqrt(head_dim + rotary_dim), residual_scale=scale,
    )  # fmt: skip
    router = functools.partial(
        Router, scores="sigmoid", normalized=normalized, scale=share_scale,
        groups=groups, top_groups=top_groups, correction_rate=correction_rate,
    )  # fmt: skip
    mixture = functools.partial(
        Mixture, embed, expert_mlp, scale, experts=experts, top=top, router=router,
        shared_mlp=shared_experts * expert_mlp or None,
    )  # fmt: skip
    dense = functools.partial(GatedMLP, embed, mlp, residual_scale=scale)
    deviation, last_scale = table_values(embed, tied)

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> RMSNorm:
        return RMSNorm(epsilon=norm_epsilon, initial=initial, embed=embed, key=key)

    def block(feed_forward: Callable[..., Part], key: PRNGKeyArray) -> Block:
        return Block(
            attention_norm=norm(fold(key, "attention_norm")),
            attention=attention(key=fold(key, "attention")),
            mlp_norm=norm(fold(key, "mlp_norm")),
            mlp=feed_forward(key=fold(key, "mlp")),
        )

    def model(key: PRNGKeyArray) -> Decoder:
        kinds = (dense, dense_layers), (mixture, layers - dense_layers)
        stack = [Segment([functools.partial(block, kind)], repeats) for kind, repeats in kinds]
        stack = [segment for segment in stack if segment.repeats]
        last = norm(fold(key, "norm"), last_scale)
        return Decoder(vocab, embed, stack, last, tied, embedding_deviation=deviation, key=key)

    return compiled(model)(key)
