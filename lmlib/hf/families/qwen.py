"""Qwen 2, 2.5 and 3, dense."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.llama import names, shared_settings, sizes
from lmlib.hf.family import Family
from lmlib.hf.folder import FolderError
from lmlib.hf.names import Tensor
from lmlib.hf.parts import attentions, head_dim
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.families.qwen import qwen2, qwen3

_FULL, _SLIDING = "full_attention", "sliding_attention"
BIASES = (
    Tensor("self_attn.q_proj.bias", {"attention.query_bias": ("heads head_dim",)}),
    Tensor("self_attn.k_proj.bias", {"attention.key_bias": ("kv_heads head_dim",)}),
    Tensor("self_attn.v_proj.bias", {"attention.value_bias": ("kv_heads head_dim",)}),
)
HEAD_NORMS = (
    Tensor("self_attn.q_norm.weight", {"attention.query_norm.scale": ("head_dim",)}),
    Tensor("self_attn.k_norm.weight", {"attention.key_norm.scale": ("head_dim",)}),
)


def _shared(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("use_mrope", False, None)
    rope, arguments = read_rope(settings), sizes(settings, kv_heads=32)
    return {
        **arguments,
        **_windows(settings, arguments["layers"]),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
    }


def _windows(settings: Settings, layers: int) -> dict[str, Any]:
    """The window, and how many layers before it have none: by layer_types, or else from layer
    max_window_layers on, but only with use_sliding_window."""
    used = settings.take("use_sliding_window", False, bool)
    window = settings.nullable("sliding_window", 4_096) if used else None
    full = settings.take("max_window_layers", 28, zero=True) if used else layers
    settings.ignore("sliding_window", "max_window_layers")
    kinds = settings.take("layer_types", None, list)
    if kinds is not None:
        full = kinds.index(_SLIDING) if _SLIDING in kinds else layers
        if kinds != _kinds(layers, full):
            raise FolderError(
                f"{settings.where}: layer_types = {kinds!r:.200} is not supported, only "
                f"{layers} layers of which the first ones are {_FULL!r} and the others {_SLIDING!r}"
            )
        if window is None and full < layers:  # transformers has no window for these layers either
            settings.take("use_sliding_window", kind=bool)
            settings.only("use_sliding_window", True)
            settings.take("sliding_window")
    return {} if window is None or full >= layers else {"window": window, "full_layers": full}


def _kinds(layers: int, full: int) -> list[str]:
    return [_FULL if layer < full else _SLIDING for layer in range(layers)]


def _window_settings(model: Decoder) -> dict[str, Any]:
    """What `_windows` reads."""
    windows = [attention.window for attention in attentions(model)]
    if windows[-1] is None:
        return {"use_sliding_window": False}
    full = windows.count(None)
    return {
        "use_sliding_window": True,
        "sliding_window": windows[-1],
        "max_window_layers": full,
        "layer_types": _kinds(len(windows), full),
    }


def _qwen2_arguments(settings: Settings) -> dict[str, Any]:
    return _shared(settings)


def _qwen3_arguments(settings: Settings) -> dict[str, Any]:
    settings.only("attention_bias", False)
    return {**_shared(settings), "head_dim": settings.take("head_dim", 128)}


def _qwen2_settings(model: Decoder) -> dict[str, Any]:
    return shared_settings(model) | _window_settings(model)


def _qwen3_settings(model: Decoder) -> dict[str, Any]:
    own = {"head_dim": head_dim(model), "attention_bias": False}
    return shared_settings(model) | _window_settings(model) | own


FAMILIES: Sequence[Family] = (
    Family("qwen2", "Qwen2ForCausalLM", qwen2, names(*BIASES), _qwen2_arguments, _qwen2_settings),
    Family(
        "qwen3", "Qwen3ForCausalLM", qwen3, names(*HEAD_NORMS), _qwen3_arguments, _qwen3_settings
    ),
)
