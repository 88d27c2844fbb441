"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.llama import PARTS, llama
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm


@variant(llama, without=f"head_dim window rotary_fraction {PARTS}")
def olmoe(
    *,
    norm_epsilon: float = 1e-5,
    experts: int = 64,
    top: int = 8,
    normalized: bool = False,
    **others: Any,
) -> Decoder:
    """OLMoE (§2): Llama with norms of queries and keys over all heads together, and with `experts`
    instead of each mlp, of which each token goes to `top`. Arguments as in `qwen3_moe`."""
    router = functools.partial(Router, normalized=normalized)
    attention = functools.partial(
        Attention,
        norm=functools.partial(RMSNorm, "heads head_dim", norm_epsilon),
        key_norm=functools.partial(RMSNorm, "kv_heads head_dim", norm_epsilon),
    )
    return llama(
        norm_epsilon=norm_epsilon, attention=attention,
        feed_forward=functools.partial(Mixture, experts=experts, top=top, router=router), **others,
    )  # fmt: skip
