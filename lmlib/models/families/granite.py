"""Granite 3, dense: Llama with a scale at each place where one can be (IBM 2024, "Granite 3.0
Language Models", §2)."""

import math

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.sizes import head_sizes
from lmlib.models.families.table_values import table_values
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary, Scaling
from lmlib.models.stack import segments
from lmlib.models.weights import compiled, fold


def granite(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float = 10_000.0,
    rope_scaling: Scaling | None = None,
    norm_epsilon: float = 1e-5,
    tied: bool = True,
    embedding_scale: float = 12.0,
    residual_multiplier: float = 0.22,
    attention_scale: float | None = None,
    logits_scale: float = 1 / 8,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Granite 3. Arguments as in `llama`, and

    Args:
      embedding_scale: of embedded tokens.
      residual_multiplier: of what attention and mlp add to the residual stream, instead of the
        smaller initial values that other families have in deep models.
      attention_scale: of scores; `None`: 1 / head_dim.
      logits_scale: of logits.

    The embedding and the last norm start so that embedded tokens and logits are as large as those
    of `llama`.

    Raises:
      ValueError: as `llama`, or if a scale is not positive.
    """
    kv_heads, head_dim = head_sizes(
        embed, heads, kv_heads, head_dim, vocab=vocab, layers=layers, mlp=mlp
    )
    scale = 1 / head_dim if attention_scale is None else attention_scale
    scales = {
        "embedding_scale": embedding_scale,
        "residual_multiplier": residual_multiplier,
        "attention_scale": scale,
        "logits_scale": logits_scale,
    }
    for name, value in scales.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    rotary = Rotary(head_dim, rope_theta, rope_scaling)
    deviation, last_scale = table_values(embed, tied)
    last_scale *= (embedding_scale if tied else 1.0) / logits_scale

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> RMSNorm:
        return RMSNorm(epsilon=norm_epsilon, initial=initial, embed=embed, key=key)

    def block(key: PRNGKeyArray) -> Block:
        return Block(
            attention_norm=norm(fold(key, "attention_norm")),
            attention=Attention(
                embed, heads, kv_heads, head_dim, rotary, scale=scale, key=fold(key, "attention")
            ),
            mlp_norm=norm(fold(key, "mlp_norm")),
            mlp=GatedMLP(embed, mlp, key=fold(key, "mlp")),
            residual_multiplier=residual_multiplier,
        )

    def model(key: PRNGKeyArray) -> Decoder:
        return Decoder(
            vocab, embed, segments([block] * layers), norm(fold(key, "norm"), last_scale), tied,
            embedding_deviation=deviation / embedding_scale,
            embedding_scale=embedding_scale,
            logits_scale=logits_scale,
            key=key,
        )  # fmt: skip

    return compiled(model)(key)
