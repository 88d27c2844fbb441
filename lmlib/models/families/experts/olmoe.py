"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.hugging_face import mixtures, shared
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.families.llama import llama
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm


@variant(without="head_dim window rotary_fraction")
def olmoe(
    *,
    norm_epsilon: float = 1e-5,
    experts: int = 64,
    top: int = 8,
    normalized: bool = False,
    **others: Any,
) -> Decoder:
    """OLMoE (§2): Llama with experts, and with query and key norms over all heads together."""
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


FAMILIES = (
    Family(
        "olmoe", "OlmoeForCausalLM", olmoe,
        mixtures.mixture_names(*shared.QUERY_KEY_NORMS, *mixtures.tensors()),
        mixtures.mixture_keys(
            mixtures.NORMALIZED, experts=64, top=8, norm=shared.epsilon("rms_norm_eps", 1e-5)
        ),
        fixed=shared.SILU | {"attention_bias": False, "clip_qkv": None}, ignored=mixtures.IGNORED,
        written=shared.NO_PADDING,  # the class's default is 1, a row that it never trains
    ),
)  # fmt: skip
