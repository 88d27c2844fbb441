"""Qwen 3 with mixtures of experts in all layers."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.experts.mixtures import (
    IN_CLASS,
    mixture,
    mixtures,
    routing,
    routing_settings,
)
from lmlib.hf.families.llama import ATTENTION, NORMS_BEFORE, OUTSIDE, shared_settings, sizes
from lmlib.hf.families.qwen import HEAD_NORMS
from lmlib.hf.family import Family
from lmlib.hf.names import Names
from lmlib.hf.parts import attentions, head_dim
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.experts.qwen3_moe import qwen3_moe

_LAYER = (*ATTENTION, *NORMS_BEFORE, *HEAD_NORMS, *mixture())


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("decoder_sparse_step", 1)  # every layer has experts
    settings.only("mlp_only_layers", [], None)
    settings.ignore("intermediate_size", "max_window_layers")  # of layers without
    used = settings.take("use_sliding_window", False, bool)
    window = settings.nullable("sliding_window", 4_096)
    rope = read_rope(settings)
    return {
        **sizes(settings, kv_heads=4, mlp="moe_intermediate_size"),
        **routing(settings, experts=128, top=8),
        "normalized": settings.take("norm_topk_prob", False, bool),
        "head_dim": settings.take("head_dim", None),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "window": window if used else None,
    }


def _settings(model: Decoder) -> dict[str, Any]:
    window, shared = attentions(model)[0].window, shared_settings(model, feed_forward=Mixture)
    return {
        **shared,
        **routing_settings(model),
        "moe_intermediate_size": shared["intermediate_size"],
        "norm_topk_prob": mixtures(model)[0].router.normalized,
        "head_dim": head_dim(model),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILIES: Sequence[Family] = (
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe, Names(OUTSIDE, _LAYER, in_class=IN_CLASS),
        _arguments, _settings,
    ),
)  # fmt: skip
