"""Mixtral: Llama with mixtures of experts (Jiang et al. 2024, arXiv:2401.04088)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.hugging_face import mixtures, shared
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.llama import llama
from lmlib.models.families.variants import variant


@variant(without="rotary_fraction")
def mixtral(
    *, rope_theta: float = 1_000_000.0, experts: int = 8, top: int = 2, **others: Any
) -> Decoder:
    """Mixtral (§2.1): Llama with a mixture of experts of size `mlp` instead of each MLP.

    Shares are the softmax over the logits of a token's `top` experts.
    """
    router = functools.partial(Router, normalized=True)
    mixture = functools.partial(Mixture, experts=experts, top=top, router=router)
    return llama(rope_theta=rope_theta, feed_forward=mixture, **others)


FAMILIES = (
    Family(
        "mixtral", "MixtralForCausalLM", mixtral,
        mixtures.mixture_names(*mixtures.tensors("block_sparse_moe", ("w1", "w3", "w2"))),
        mixtures.mixture_keys(
            shared.HEAD_DIM, shared.WINDOW, experts=8, top=2, count="num_local_experts",
            kv_heads=8, norm=shared.epsilon("rms_norm_eps", 1e-5),
        ),
        Rope(1_000_000.0), shared.SILU, ignored=mixtures.IGNORED,
    ),
)  # fmt: skip
