"""Phi-3 and Phi-4, whose folders hold fused projections."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.family import Family
from lmlib.hf.llama import NORMS_BEFORE, OUTSIDE, shared_settings, sizes
from lmlib.hf.names import Names, Tensor
from lmlib.hf.settings import Settings
from lmlib.models.architecture import Architecture
from lmlib.models.families.phi import phi3

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
    settings.only("attention_bias", False)
    settings.ignore("original_max_position_embeddings")  # of a scaling, which is refused
    turned = settings.take("partial_rotary_factor", None, float)
    for key in ("rope_parameters", "rope_scaling"):
        own = settings.take(key, {}, dict).get("partial_rotary_factor")
        turned = own if turned is None else turned
    theta, _ = settings.rope(scalings=())
    return {
        **sizes(settings, epsilon=1e-5),
        "rope_theta": theta,
        "window": settings.take("sliding_window", None),
        "turned": 1.0 if turned is None else float(turned),
    }


def _settings(model: Architecture) -> dict[str, Any]:
    rotary = model.layers[0].rotary
    turned = 1.0 if rotary is None else rotary.head_dim / model.head_dim
    shared = shared_settings(model)
    shared["rope_parameters"] |= {"partial_rotary_factor": turned}
    # Its class would take 32,000 for the id of padding, which the vocabulary may not have.
    return shared | {"sliding_window": model.layers[0].window, "pad_token_id": None}


FAMILIES: Sequence[Family] = (
    Family("phi3", "Phi3ForCausalLM", phi3, Names(OUTSIDE, _LAYER), _arguments, _settings),
)
