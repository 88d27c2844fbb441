"""Phi-3 and Phi-4, whose folders hold fused projections."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.llama import NORMS_BEFORE, OUTSIDE, shared_settings, sizes
from lmlib.hf.family import Family
from lmlib.hf.names import Names, Tensor
from lmlib.hf.parts import attentions, head_dim
from lmlib.hf.rope_settings import read_rope, rotary_fraction_of
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.families.phi import phi3
from lmlib.models.parts.rope_scaling import LongRope

_LAYER = (
    *NORMS_BEFORE,
    Tensor(
        "self_attn.qkv_proj.weight",
        {
            "attention.query": ("heads head_dim", "embed"),
            "attention.key": ("kv_heads head_dim", "embed"),
            "attention.value": ("kv_heads head_dim", "embed"),
        },
    ),
    Tensor("self_attn.o_proj.weight", {"attention.output": ("embed", "heads head_dim")}),
    Tensor("mlp.gate_up_proj.weight", {"mlp.gate": ("mlp", "embed"), "mlp.up": ("mlp", "embed")}),
    Tensor("mlp.down_proj.weight", {"mlp.down": ("embed", "mlp")}),
)


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        settings.only(key, False, None)
    for key in ("full_attn_mod", "interpolate_factor"):  # Phi-4 mini's
        settings.only(key, 1, None)
    rope = read_rope(settings, scalings=(LongRope,), partial=True)
    return {
        **sizes(settings, epsilon=1e-5),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "window": settings.take("sliding_window", None),
        "rotary_fraction": rope.rotary_fraction,
    }


def _settings(model: Decoder) -> dict[str, Any]:
    first = attentions(model)[0]
    fraction = rotary_fraction_of(first.rotary, head_dim(model))
    shared = shared_settings(model, rope_kind="type") | {"partial_rotary_factor": fraction}
    shared["rope_parameters"] |= {"partial_rotary_factor": fraction}
    # Its class would take 32,000 for the id of padding, which the vocabulary may not have.
    return shared | {"sliding_window": first.window, "pad_token_id": None}


FAMILIES: Sequence[Family] = (
    Family("phi3", "Phi3ForCausalLM", phi3, Names(OUTSIDE, _LAYER), _arguments, _settings),
)
