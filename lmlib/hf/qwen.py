"""Qwen 2, 2.5 and 3, dense."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.family import Family
from lmlib.hf.llama import names, shared_settings, sizes
from lmlib.hf.names import Tensor
from lmlib.hf.settings import Settings
from lmlib.models.architecture import Architecture
from lmlib.models.families.qwen import qwen2, qwen3

_BIASES = (
    Tensor("self_attn.q_proj.bias", {"attention.query_bias": ("heads head_dim",)}),
    Tensor("self_attn.k_proj.bias", {"attention.key_bias": ("kv_heads head_dim",)}),
    Tensor("self_attn.v_proj.bias", {"attention.value_bias": ("kv_heads head_dim",)}),
)
_HEAD_NORMS = (
    Tensor("self_attn.q_norm.weight", {"attention.query_norm.scale": ("head_dim",)}),
    Tensor("self_attn.k_norm.weight", {"attention.key_norm.scale": ("head_dim",)}),
)


def _shared(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("use_sliding_window", False)
    settings.only("use_mrope", False)
    settings.ignore("sliding_window", "max_window_layers")  # since no layer slides
    kinds = settings.take("layer_types", None, list)
    if kinds is not None and set(kinds) != {"full_attention"}:
        settings.only("layer_types", "full_attention in each layer")
    theta, scaling = settings.rope()
    return {**sizes(settings, kv_heads=32), "rope_theta": theta, "rope_scaling": scaling}


def _qwen2_arguments(settings: Settings) -> dict[str, Any]:
    return _shared(settings)


def _qwen3_arguments(settings: Settings) -> dict[str, Any]:
    settings.only("attention_bias", False)
    return {**_shared(settings), "head_dim": settings.take("head_dim", 128)}


def _qwen2_settings(model: Architecture) -> dict[str, Any]:
    return shared_settings(model) | {"use_sliding_window": False}


def _qwen3_settings(model: Architecture) -> dict[str, Any]:
    own = {"head_dim": model.head_dim, "attention_bias": False, "use_sliding_window": False}
    return shared_settings(model) | own


FAMILIES: Sequence[Family] = (
    Family("qwen2", "Qwen2ForCausalLM", qwen2, names(*_BIASES), _qwen2_arguments, _qwen2_settings),
    Family(
        "qwen3", "Qwen3ForCausalLM", qwen3, names(*_HEAD_NORMS), _qwen3_arguments, _qwen3_settings
    ),
)
