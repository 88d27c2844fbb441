"""Qwen 3 with mixtures of experts in all layers (Yang et al. 2025, arXiv:2505.09388)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.hugging_face import mixtures, parts, shared
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.llama import llama
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm


@variant(without="rotary_fraction")
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
    """Qwen 3 with experts (§2): Llama with experts of size `mlp`, and norms of each head's q and k.

    If `normalized`, a token's shares add up to 1; else they are probabilities over all experts.
    """
    router = functools.partial(Router, normalized=normalized)
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon)
    return llama(
        head_dim=head_dim, rope_theta=rope_theta, norm_epsilon=norm_epsilon,
        attention=functools.partial(Attention, norm=norm),
        feed_forward=functools.partial(Mixture, experts=experts, top=top, router=router), **others,
    )  # fmt: skip


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    used = settings.take("use_sliding_window", False, bool)
    size = settings.take("sliding_window", 4_096, null=True)
    return {"window": size if used else None}


def _written(model: Decoder) -> dict[str, Any]:
    size, mlp = parts.window(model), shared.mlp_size(model, Mixture)
    return {
        "use_sliding_window": size is not None,
        "sliding_window": size,
        "intermediate_size": mlp,  # readers do not use it
    }


FAMILIES = (
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe,
        mixtures.mixture_names(*shared.HEAD_NORMS, *mixtures.tensors()),
        mixtures.mixture_keys(
            mixtures.NORMALIZED, shared.HEAD_DIM, experts=128, top=8, kv_heads=4,
            mlp_key="moe_intermediate_size",
        ),
        # Every layer has experts, so the size of dense layers is not read.
        fixed=shared.SILU | {"attention_bias": False, "decoder_sparse_step": 1},
        only={"mlp_only_layers": ([], None)},
        ignored=(*mixtures.IGNORED, "intermediate_size", "max_window_layers"),
        written={"mlp_only_layers": []}, reads=_read, writes=_written,
    ),
)  # fmt: skip
