"""Llama: a pre-norm decoder with rotary grouped-query attention and SwiGLU (Touvron et al. 2023,
arXiv:2302.13971)."""

from collections.abc import Callable
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.attention import Attention
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.mlp import GatedMLP
from lmlib.models.norms import RMSNorm
from lmlib.models.rope import Rotary
from lmlib.models.stack import Segment
from lmlib.models.weights import compiled, fold, residual_scale


def llama(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float = 10_000.0,
    norm_epsilon: float = 1e-5,
    tied: bool = False,
    window: int | None = None,
    attention: Callable[..., Any] = Attention,
    feed_forward: Callable[..., Any] = GatedMLP,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """A Llama with new weights.

    Args:
      vocab, embed, layers, heads, kv_heads, head_dim, mlp: sizes. `head_dim` defaults to
        embed / heads, `kv_heads` to `heads`.
      rope_theta: base of the rotary wavelengths.
      norm_epsilon: added to the mean square in every norm.
      tied: one table embeds and unembeds.
      window: positions that each one attends to, itself and those before it; `None` for all.
      attention, feed_forward: make the parts of a block, to change one of them:
        `functools.partial(GatedMLP, activation=gelu)`.
      key: seed of the weights.

    Raises:
      ValueError: if a size is not positive, `heads` does not divide `embed` where it has to,
        `kv_heads` does not divide `heads`, or `head_dim` is odd.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    _check_positive(vocab=vocab, embed=embed, layers=layers, mlp=mlp)
    _check_positive(heads=heads, kv_heads=kv_heads)
    if head_dim is None and embed % heads:
        raise ValueError(f"embed = {embed} must be a multiple of heads = {heads}, or give head_dim")
    head_dim = embed // heads if head_dim is None else head_dim
    rotary, scale = Rotary(head_dim, rope_theta), residual_scale(layers)

    def norm(key: PRNGKeyArray, first: float = 1.0) -> RMSNorm:
        return RMSNorm(epsilon=norm_epsilon, first=first, embed=embed, key=key)

    def block(key: PRNGKeyArray) -> Block:
        return Block(
            attention_norm=norm(fold(key, "attention_norm")),
            attention=attention(
                embed,
                heads,
                kv_heads,
                head_dim,
                rotary,
                window,
                residual_scale=scale,
                key=fold(key, "attention"),
            ),
            mlp_norm=norm(fold(key, "mlp_norm")),
            mlp=feed_forward(embed, mlp, residual_scale=scale, key=fold(key, "mlp")),
        )

    def model(key: PRNGKeyArray) -> Decoder:
        # A tied table is the unembedding, too: the norm before it makes logits of deviation 1.
        deviation = 0.25 if tied else 1.0
        last = norm(fold(key, "norm"), embed**-0.5 / deviation if tied else 1.0)
        segments = [Segment([block], layers)]
        return Decoder(vocab, embed, segments, last, tied, embedding_deviation=deviation, key=key)

    return compiled(model)(key)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
