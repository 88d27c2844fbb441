"""Gemma 2, and Gemma 3's text models."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.llama import ATTENTION, MLP, OUTSIDE, shared_settings, sizes
from lmlib.hf.family import Family
from lmlib.hf.folder import FolderError
from lmlib.hf.names import Names, Tensor
from lmlib.hf.parts import attentions, head_dim
from lmlib.hf.rope_settings import read_rope, write_rope
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.families.gemma import gemma2, gemma3
from lmlib.models.parts.rope_scaling import Linear, Llama3, Yarn

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
_PERIODS = ("sliding_window_pattern", "_sliding_window_pattern")


def _kinds(layers: int, period: int) -> list[str]:
    return [_GLOBAL if (i + 1) % period == 0 else _LOCAL for i in range(layers)]


def _period(settings: Settings, layers: int, stated: str | None, default: int) -> int:
    """Each so many-th layer is global.

    Args:
      stated: the key that says so, unless layer_types lists the layers; `None`: the family has
        none.
      default: where neither is there.
    """
    kinds = settings.take("layer_types", None, list)
    if kinds is None:
        period = default if stated is None else settings.take(stated, default)
        for key in _PERIODS:  # transformers reads no other
            settings.only(key, period, None)
        return period
    settings.ignore(*_PERIODS)
    period = kinds.index(_GLOBAL) + 1 if _GLOBAL in kinds else layers + 1
    if kinds != _kinds(layers, period):
        raise FolderError(
            f"{settings.where}: layer_types = {kinds!r:.200} is not supported, only "
            f"{layers} layers of which each n-th is {_GLOBAL!r} and all others are {_LOCAL!r}"
        )
    return period


def _shared(settings: Settings, stated: str | None, period: int) -> dict[str, Any]:
    settings.only("hidden_activation", "gelu_pytorch_tanh")
    settings.only("hidden_act", "gelu_pytorch_tanh", None)  # which transformers does not read
    settings.only("attention_bias", False)
    settings.only("use_bidirectional_attention", False, None)
    arguments = sizes(settings, tied=True, kv_heads=4)
    window = settings.take("sliding_window", 4_096)
    settings.only("sliding_window_size", window, None)  # Gemma 2 9B says it twice
    return {
        **arguments,
        "head_dim": settings.take("head_dim", 256),
        "query_scale": settings.take("query_pre_attn_scalar", 256.0, float),
        "window": window,
        "period": _period(settings, arguments["layers"], stated, period),
    }


def _gemma2_arguments(settings: Settings) -> dict[str, Any]:
    return {
        **_shared(settings, None, 2),
        "rope_theta": read_rope(settings, scalings=()).theta,
        "attention_cap": settings.nullable("attn_logit_softcapping", 50.0, float),
        "logit_cap": settings.nullable("final_logit_softcapping", 30.0, float),
    }


def _gemma3_arguments(settings: Settings) -> dict[str, Any]:
    settings.only("attn_logit_softcapping")
    settings.only("final_logit_softcapping")
    ropes = Settings(
        settings.take("rope_parameters", {}, dict), f"{settings.where}: rope_parameters", ()
    )
    whole, local = (ropes.take(kind, {}, dict) for kind in (_GLOBAL, _LOCAL))
    ropes.done()
    # As transformers puts them together: rope_scaling's keys over the others.
    whole = {"rope_type": "default"} | whole | settings.take("rope_scaling", {}, dict)
    rope = read_rope(
        Settings(
            {
                "rope_parameters": whole,
                "max_position_embeddings": settings.take("max_position_embeddings", None),
            },
            f"{settings.where}: {_GLOBAL}",
        ),
        settings.nullable("rope_theta", 1_000_000.0, float),
        (Linear, Llama3, Yarn),
    )
    local_rope = read_rope(
        Settings({"rope_parameters": local}, f"{settings.where}: {_LOCAL}"),
        settings.nullable("rope_local_base_freq", 10_000.0, float),
        (),
    )
    return {
        **_shared(settings, "sliding_window_pattern", 6),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "local_rope_theta": local_rope.theta,
    }


def _settings(model: Decoder) -> dict[str, Any]:
    mixers = attentions(model)
    windows, scale = [mixer.window for mixer in mixers], mixers[0].scale
    kinds = [_GLOBAL if window is None else _LOCAL for window in windows]
    shared = shared_settings(model)
    del shared["hidden_act"]
    return shared | {
        "head_dim": head_dim(model),
        "query_pre_attn_scalar": head_dim(model) if scale is None else round(scale**-2),
        "sliding_window": next((window for window in windows if window is not None), 4_096),
        "layer_types": kinds,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "pad_token_id": None,  # its class would take 0, whose row of the table it never trains
    }


def _gemma2_settings(model: Decoder) -> dict[str, Any]:
    return _settings(model) | {
        "attn_logit_softcapping": attentions(model)[0].soft_cap,
        "final_logit_softcapping": model.logit_cap,
    }


def _gemma3_settings(model: Decoder) -> dict[str, Any]:
    ropes = {
        _GLOBAL if mixer.window is None else _LOCAL: write_rope(mixer.rotary)
        for mixer in attentions(model)
        if mixer.rotary is not None
    }
    # Old files have global layers' rope as other families have theirs, and local layers' base.
    local = {"rope_local_base_freq": ropes[_LOCAL]["rope_theta"]} if _LOCAL in ropes else {}
    new = {kind: rope["rope_parameters"] for kind, rope in ropes.items()}
    return _settings(model) | ropes.get(_GLOBAL, {}) | local | {"rope_parameters": new}


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
