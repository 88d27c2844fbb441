"""OLMo 2."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.llama import ATTENTION, MLP, OUTSIDE, shared_settings, sizes
from lmlib.hf.family import Family
from lmlib.hf.names import Names, Tensor
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.families.olmo import olmo2

QUERY_KEY_NORMS = (
    Tensor("self_attn.q_norm.weight", {"attention.query_norm.scale": ("heads head_dim",)}),
    Tensor("self_attn.k_norm.weight", {"attention.key_norm.scale": ("kv_heads head_dim",)}),
)
_LAYER = (
    *ATTENTION,
    *MLP,
    *QUERY_KEY_NORMS,
    Tensor("post_attention_layernorm.weight", {"attention_after_norm.scale": ("embed",)}),
    Tensor("post_feedforward_layernorm.weight", {"mlp_after_norm.scale": ("embed",)}),
)


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    rope = read_rope(settings)
    return {
        **sizes(settings, epsilon=1e-5),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
    }


def _settings(model: Decoder) -> dict[str, Any]:
    # The default pad_token_id of its class is 1, a row of the table that it would never train.
    own = {"attention_bias": False, "pad_token_id": None}
    return shared_settings(model, rope_kind="type") | own


FAMILIES: Sequence[Family] = (
    Family("olmo2", "Olmo2ForCausalLM", olmo2, Names(OUTSIDE, _LAYER), _arguments, _settings),
)
