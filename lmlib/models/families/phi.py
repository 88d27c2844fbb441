"""Phi-3 and Phi-4: Llama, published with its projections fused (Abdin et al. 2024,
arXiv:2404.14219)."""

from jaxtyping import PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import llama
from lmlib.models.parts.rope_scaling import Scaling


def phi3(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    rope_theta: float = 10_000.0,
    rope_scaling: Scaling | None = None,
    norm_epsilon: float = 1e-5,
    tied: bool = False,
    window: int | None = None,
    turned: float = 1.0,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Phi-3 and Phi-4 (§2): Llama in all its math. Arguments as in `llama`.

    Args:
      rope_scaling: a `LongRope` in long contexts (Phi-3.5, Phi-4 mini).
      turned: share of each head's coordinates that rotary positions turn; Phi-4 mini has 3/4.
    """
    return llama(
        vocab, embed, layers, heads, mlp, kv_heads, None, rope_theta, rope_scaling, norm_epsilon,
        tied, window, turned, key=key,
    )  # fmt: skip
