"""Gemma 2 and 3, text (Gemma Team 2024, arXiv:2408.00118; 2025, arXiv:2503.19786)."""

import functools
from collections.abc import Callable, Sequence

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.sizes import head_sizes
from lmlib.models.families.table_values import tied_scale
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP, gelu_tanh
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary, Scaling
from lmlib.models.stack import segments
from lmlib.models.weights import compiled, fold


def gemma2(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int = 256,
    query_scale: float = 256.0,
    window: int = 4_096,
    period: int = 2,
    rope_theta: float = 10_000.0,
    norm_epsilon: float = 1e-6,
    attention_cap: float | None = 50.0,
    logit_cap: float | None = 30.0,
    tied: bool = True,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Gemma 2 (§2). Where it departs from Llama: norms before and after attention and mlp, whose
    scale is added to 1; embedded tokens multiplied by √embed; gelu instead of silu; scores and
    logits capped; layers with a window in turn with layers without.

    Args:
      vocab, embed, layers, heads, kv_heads, head_dim, mlp, rope_theta, norm_epsilon, tied: as in
        `llama`.
      query_scale: scores are multiplied by its power -1/2.
      window: positions that a local layer attends to.
      period: each so many-th layer is global, the others are local.
      attention_cap, logit_cap: c, where scores or logits z become c · tanh(z / c); `None`: they
        stay.
      key: seed of the weights.
    """
    kv_heads, head_dim = head_sizes(
        embed, heads, kv_heads, head_dim, vocab=vocab, layers=layers, mlp=mlp
    )
    rotary = Rotary(head_dim, rope_theta)
    attention = functools.partial(
        Attention, embed, heads, kv_heads, head_dim, rotary,
        scale=query_scale**-0.5, soft_cap=attention_cap,
    )  # fmt: skip
    kinds = [functools.partial(attention, window), attention]
    return _gemma(
        vocab, embed, mlp, _in_turn(kinds, layers, period), norm_epsilon, logit_cap, tied, key
    )


def gemma3(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int = 256,
    query_scale: float = 256.0,
    window: int = 512,
    period: int = 6,
    rope_theta: float = 1_000_000.0,
    rope_scaling: Scaling | None = None,
    local_rope_theta: float = 10_000.0,
    norm_epsilon: float = 1e-6,
    tied: bool = True,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Gemma 3, text (§2.1): Gemma 2 without caps, with norms of each head's queries and keys, and
    with other rotary positions in local layers than in global ones.

    Args: as in `gemma2`, and
      rope_theta, rope_scaling: of global layers; the larger models have a `Linear` scaling.
      local_rope_theta: of local layers.
    """
    kv_heads, head_dim = head_sizes(
        embed, heads, kv_heads, head_dim, vocab=vocab, layers=layers, mlp=mlp
    )
    make = functools.partial(
        Attention, embed, heads, kv_heads, head_dim,
        scale=query_scale**-0.5, norm=functools.partial(RMSNorm, "head_dim", norm_epsilon, 1.0),
    )  # fmt: skip
    kinds = [
        functools.partial(make, Rotary(head_dim, local_rope_theta), window),
        functools.partial(make, Rotary(head_dim, rope_theta, rope_scaling)),
    ]
    return _gemma(vocab, embed, mlp, _in_turn(kinds, layers, period), norm_epsilon, None, tied, key)


def _in_turn(
    kinds: Sequence[Callable[..., Attention]], layers: int, period: int
) -> list[Callable[..., Attention]]:
    """Local attention, but each `period`-th layer global."""
    if layers < 1 or period < 1:
        raise ValueError(f"layers and period must be at least 1, got {layers} and {period}")
    local, whole = kinds
    return [whole if (i + 1) % period == 0 else local for i in range(layers)]


def _gemma(
    vocab: int,
    embed: int,
    mlp: int,
    attentions: Sequence[Callable[..., Attention]],
    norm_epsilon: float,
    logit_cap: float | None,
    tied: bool,
    key: PRNGKeyArray,
) -> Decoder:
    """What writes to the residual stream is normed, so its initial values need no scale for depth;
    √embed makes a tied table's two uses alike."""

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> RMSNorm:
        return RMSNorm(epsilon=norm_epsilon, offset=1.0, initial=initial, embed=embed, key=key)

    def block(attention: Callable[..., Attention], key: PRNGKeyArray) -> Block:
        return Block(
            attention_norm=norm(key),
            attention=attention(key=fold(key, "attention")),
            attention_after_norm=norm(key),
            mlp_norm=norm(key),
            mlp=GatedMLP(embed, mlp, gelu_tanh, key=fold(key, "mlp")),
            mlp_after_norm=norm(key),
        )

    def model(key: PRNGKeyArray) -> Decoder:
        makers = {kind: functools.partial(block, kind) for kind in dict.fromkeys(attentions)}
        deviation = embed**-0.5
        last = norm(key, tied_scale(embed, deviation) if tied else 1.0)
        return Decoder(
            vocab, embed, segments([makers[kind] for kind in attentions]), last, tied,
            logit_cap=logit_cap,
            embedding_deviation=deviation,
            embedding_scale=embed**0.5,
            key=key,
        )  # fmt: skip

    return compiled(model)(key)
