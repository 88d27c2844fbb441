"""Qwen: Llama with biases of queries, keys and values (2 and 2.5), or with norms of queries and
keys (3)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import PARTS, llama
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm


@variant(llama, without=f"head_dim rotary_fraction {PARTS}")
def qwen2(
    *,
    layers: int,
    rope_theta: float = 1_000_000.0,
    norm_epsilon: float = 1e-6,
    window: int | None = None,
    full_layers: int = 0,
    **others: Any,
) -> Decoder:
    """Qwen 2 and 2.5 (arXiv:2407.10671, §2.2.1; arXiv:2412.15115): Llama with biases of queries,
    keys and values. Arguments as in `llama`; `rope_scaling` is a `Yarn` in long contexts.

    Args:
      full_layers: so many layers, the first ones, attend to all positions even if there is a
        `window`.
    """
    return llama(
        layers=layers, rope_theta=rope_theta, norm_epsilon=norm_epsilon,
        window=_windows(layers, window, full_layers),
        attention=functools.partial(Attention, bias=True), **others,
    )  # fmt: skip


@variant(llama, without=f"rotary_fraction {PARTS}")
def qwen3(
    *,
    layers: int,
    head_dim: int | None = 128,
    rope_theta: float = 1_000_000.0,
    norm_epsilon: float = 1e-6,
    window: int | None = None,
    full_layers: int = 0,
    **others: Any,
) -> Decoder:
    """Qwen 3, dense (arXiv:2505.09388, §2): Llama with norms of each head's queries and keys.
    Arguments as in `qwen2`."""
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon)
    return llama(
        layers=layers, head_dim=head_dim, rope_theta=rope_theta, norm_epsilon=norm_epsilon,
        window=_windows(layers, window, full_layers),
        attention=functools.partial(Attention, norm=norm), **others,
    )  # fmt: skip


def _windows(layers: int, window: int | None, full: int) -> list[int | None]:
    if full < 0:
        raise ValueError(f"full_layers must not be negative, got {full}")
    return [None if layer < full else window for layer in range(layers)]
