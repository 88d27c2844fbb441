"""Qwen 3 with mixtures of experts (Yang et al. 2025, arXiv:2505.09388)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.llama import PARTS, llama
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm


@variant(llama, without=f"rotary_fraction {PARTS}")
def qwen3_moe(
    *,
    head_dim: int | None = 128,
    rope_theta: float = 1_000_000.0,
    norm_epsilon: float = 1e-6,
    experts: int = 128,
    top: int = 8,
    normalized: bool = True,
    **others: Any,
) -> Decoder:
    """Qwen 3's mixtures of experts (§2): Llama with norms of each head's queries and keys, and with
    `experts` instead of each mlp, of which each token goes to `top`. Arguments as in `llama`; `mlp`
    is the size of each expert.

    Args:
      normalized: whether a token's shares add up to 1; else they are probabilities of all experts.
    """
    router = functools.partial(Router, normalized=normalized)
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon)
    return llama(
        head_dim=head_dim, rope_theta=rope_theta, norm_epsilon=norm_epsilon,
        attention=functools.partial(Attention, norm=norm),
        feed_forward=functools.partial(Mixture, experts=experts, top=top, router=router), **others,
    )  # fmt: skip
