"""Llama: a pre-norm decoder with rotary grouped-query attention and SwiGLU.

Sources: Touvron et al. 2023, arXiv:2302.13971; Llama 3: Dubey et al. 2024, arXiv:2407.21783.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.families.transformer import transformer
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.rope import Scaling


def llama(
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
    tied: bool = False,
    window: int | Sequence[int | None] | None = None,
    rotary_fraction: float = 1.0,
    attention: Callable[..., Any] = Attention,
    feed_forward: Callable[..., Any] = GatedMLP,
    layer: Callable[..., Part] | None = None,
    zero_outputs: bool = False,
    logit_cap: float | None = None,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Returns a Llama with new weights. Raises ValueError if sizes do not fit each other.

    Args:
      head_dim, kv_heads: `None`: embed / heads, and as many as `heads`.
      rope_theta, rope_scaling: base of the rotary wavelengths; Llama 3.1 to 3.3 have a `Llama3`.
      tied: True if one table embeds and unembeds.
      window: number of positions that each one attends to, with itself; or one for each layer.
      rotary_fraction: fraction of each head's coordinates that have rotary positions.
      attention, feed_forward: make a block's parts: `partial(GatedMLP, activation=gelu)`.
      layer: makes a layer from a block, as `lmlib.models.residual_scales.ResidualScales` does.
      zero_outputs: True to initialize the matrices that write to the residual stream with zeros,
        so that each layer starts as the identity (Zhang et al. 2019, arXiv:1901.09321, §2).
      logit_cap: c; logits z become c · tanh(z / c).
    """
    return transformer(
        vocab, embed, layers, heads, mlp, kv_heads, head_dim, rope_theta, rope_scaling,
        norm_epsilon, tied, window, rotary_fraction, attention=attention, feed_forward=feed_forward,
        layer=layer, writes=0.0 if zero_outputs else None, logit_cap=logit_cap, key=key,
    )  # fmt: skip
