"""Mistral: Llama with a window (Jiang et al. 2023, arXiv:2310.06825)."""

from jaxtyping import PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import llama


def mistral(
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
    window: int | None = 4_096,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Mistral (§2): Llama whose layers all attend to a window. Arguments as in `llama`; later
    versions have no window."""
    return llama(
        vocab, embed, layers, heads, mlp, kv_heads, head_dim, rope_theta, None, norm_epsilon,
        tied, window, key=key,
    )  # fmt: skip
