"""Gemma 2, and Gemma 3's text models."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.family import Family
from lmlib.hf.llama import ATTENTION, MLP, OUTSIDE, shared_settings, sizes
from lmlib.hf.names import Names, Tensor
from lmlib.hf.settings import Settings, rope_parameters
from lmlib.models.architecture import Architecture
from lmlib.models.families.gemma import gemma2, gemma3
from lmlib.models.rope_scaling import Linear, Llama3, Yarn

_LAYER = (
    *ATTENTION,
    *MLP,
    Tensor("input_layernorm.weight", {"attention_norm.scale": ("embed",)}),
    Tensor("post_attention_layernorm.weight", {"attention_after_norm.scale": ("embed",)}),
    Tensor("pre_feedforward_layernorm.weight", {"mlp_norm.scale": ("embed",)}),
    Tensor("post_feedforward_layernorm.weight", {"mlp_after_norm.scale": ("embed",)}),
)
_HEAD_NORMS = (
    Tensor("self_attn.q_norm.weight", {"attention.query_norm.scale": ("head_dim",)}),
    Tensor("self_attn.k_norm.weight", {"attention.key_norm.scale": ("head_dim",)}),
)
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def _kinds(layers: int, period: int) -> list[str]:
    return [_GLOBAL if (i + 1) % period == 0 else _LOCAL for i in range(layers)]


def _shared(settings: Settings, period: int) -> dict[str, Any]:
    for key in ("hidden_act", "hidden_activation"):
        settings.only(key, "gelu_pytorch_tanh")
    settings.only("attention_bias", False)
    settings.only("use_bidirectional_attention", False)
    arguments = sizes(settings, tied=True, kv_heads=4)
    layers = arguments["layers"]
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        period = settings.take(key, period)
    kinds = settings.take("layer_types", None, list)
    if kinds is not None:
        period = kinds.index(_GLOBAL) + 1 if _GLOBAL in kinds else layers + 1
        if kinds != _kinds(layers, period):
            settings.only("layer_types", f"local layers with each {period}th global")
    window = settings.take("sliding_window", 4_096)
    settings.only("sliding_window_size", window)  # Gemma 2 9B says it twice
    return {
        **arguments,
        "head_dim": settings.take("head_dim", 256),
        "query_scale": settings.take("query_pre_attn_scalar", 256.0, float),
        "window": window,
        "period": period,
    }


def _gemma2_arguments(settings: Settings) -> dict[str, Any]:
    theta, _ = settings.rope(scalings=())
    return {
        **_shared(settings, 2),
        "rope_theta": theta,
        "attention_cap": settings.nullable("attn_logit_softcapping", 50.0, float),
        "logit_cap": settings.nullable("final_logit_softcapping", 30.0, float),
    }


def _gemma3_arguments(settings: Settings) -> dict[str, Any]:
    settings.only("attn_logit_softcapping")
    settings.only("final_logit_softcapping")
    new = settings.take("rope_parameters", {}, dict)
    local = Settings(
        {
            "rope_parameters": new.get(_LOCAL),
            "rope_theta": settings.take("rope_local_base_freq", None, float),
        },
        settings.where,
    )
    whole = Settings(
        {
            "rope_parameters": new.get(_GLOBAL),
            "rope_scaling": settings.take("rope_scaling", None, dict),
            "rope_theta": settings.take("rope_theta", None, float),
            "max_position_embeddings": settings.take("max_position_embeddings", None),
        },
        settings.where,
    )
    theta, scaling = whole.rope(1_000_000.0, (Linear, Llama3, Yarn))
    local_theta, _ = local.rope(10_000.0, scalings=())
    return {
        **_shared(settings, 6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local_theta,
    }


def _settings(model: Architecture) -> dict[str, Any]:
    windows = [layer.window for layer in model.layers]
    kinds = [_GLOBAL if window is None else _LOCAL for window in windows]
    shared = shared_settings(model)
    del shared["hidden_act"]
    return shared | {
        "head_dim": model.head_dim,
        "query_pre_attn_scalar": model.head_dim if model.scale is None else round(model.scale**-2),
        "sliding_window": next((window for window in windows if window is not None), 4_096),
        "layer_types": kinds,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }


def _gemma2_settings(model: Architecture) -> dict[str, Any]:
    return _settings(model) | {
        "attn_logit_softcapping": model.attention_cap,
        "final_logit_softcapping": model.logit_cap,
    }


def _gemma3_settings(model: Architecture) -> dict[str, Any]:
    turned = {}
    for layer in model.layers:
        if layer.rotary is not None:
            kind = _GLOBAL if layer.window is None else _LOCAL
            turned[kind] = rope_parameters(layer.rotary.theta, layer.rotary.scaling)
    return _settings(model) | {"rope_parameters": turned}


FAMILIES: Sequence[Family] = (
    Family(
        "gemma2", "Gemma2ForCausalLM", gemma2, Names(OUTSIDE, _LAYER),
        _gemma2_arguments, _gemma2_settings,
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", gemma3, Names(OUTSIDE, (*_LAYER, *_HEAD_NORMS)),
        _gemma3_arguments, _gemma3_settings,
    ),
)  # fmt: skip
