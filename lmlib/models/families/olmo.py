"""OLMo 2 (Team OLMo 2025, arXiv:2501.00656)."""

import functools

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


def olmo2(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    rope_theta: float = 500_000.0,
    rope_scaling: Scaling | None = None,
    norm_epsilon: float = 1e-6,
    tied: bool = False,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """OLMo 2 (§3.1): Llama with norms after attention and mlp instead of before them, and with
    norms of queries and keys over all heads together. Arguments as in `llama`.

    What layers write is normed, so its initial values need no scale for depth.
    """
    kv_heads, head_dim = head_sizes(
        embed, heads, kv_heads, None, vocab=vocab, layers=layers, mlp=mlp
    )
    rotary = Rotary(head_dim, rope_theta, rope_scaling)
    deviation, last_scale = table_values(embed, tied)

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> RMSNorm:
        return RMSNorm(epsilon=norm_epsilon, initial=initial, embed=embed, key=key)

    def block(key: PRNGKeyArray) -> Block:
        return Block(
            attention=Attention(
                embed, heads, kv_heads, head_dim, rotary,
                norm=functools.partial(RMSNorm, "heads head_dim", norm_epsilon),
                key_norm=functools.partial(RMSNorm, "kv_heads head_dim", norm_epsilon),
                key=fold(key, "attention"),
            ),
            attention_after_norm=norm(fold(key, "attention_after_norm")),
            mlp=GatedMLP(embed, mlp, key=fold(key, "mlp")),
            mlp_after_norm=norm(fold(key, "mlp_after_norm")),
        )  # fmt: skip

    def model(key: PRNGKeyArray) -> Decoder:
        last = norm(fold(key, "norm"), last_scale)
        stack = segments([block] * layers)
        return Decoder(vocab, embed, stack, last, tied, embedding_deviation=deviation, key=key)

    return compiled(model)(key)
