"""Qwen: Llama with biases of queries, keys and values (2 and 2.5), or with norms of queries and
keys (3)."""

import functools

from jaxtyping import PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import llama
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope_scaling import Scaling


def qwen2(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    rope_theta: float = 1_000_000.0,
    rope_scaling: Scaling | None = None,
    norm_epsilon: float = 1e-6,
    tied: bool = False,
    window: int | None = None,
    full_layers: int = 0,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Qwen 2 and 2.5 (arXiv:2407.10671, §2.2.1; arXiv:2412.15115): Llama with biases of queries,
    keys and values. Arguments as in `llama`; `rope_scaling` is a `Yarn` in long contexts.

    Args:
      full_layers: so many layers, the first ones, attend to all positions even if there is a
        `window`.
    """
    return llama(
        vocab, embed, layers, heads, mlp, kv_heads, None, rope_theta, rope_scaling, norm_epsilon,
        tied, _windows(layers, window, full_layers),
        attention=functools.partial(Attention, bias=True), key=key,
    )  # fmt: skip


def qwen3(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int | None = 128,
    rope_theta: float = 1_000_000.0,
    rope_scaling: Scaling | None = None,
    norm_epsilon: float = 1e-6,
    tied: bool = False,
    window: int | None = None,
    full_layers: int = 0,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Qwen 3, dense (arXiv:2505.09388, §2): Llama with norms of each head's queries and keys.
    Arguments as in `qwen2`."""
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon)
    return llama(
        vocab, embed, layers, heads, mlp, kv_heads, head_dim, rope_theta, rope_scaling,
        norm_epsilon, tied, _windows(layers, window, full_layers),
        attention=functools.partial(Attention, norm=norm), key=key,
    )  # fmt: skip


def _windows(layers: int, window: int | None, full: int) -> list[int | None]:
    if full < 0:
        raise ValueError(f"full_layers must not be negative, got {full}")
    return [None if layer < full else window for layer in range(layers)]
