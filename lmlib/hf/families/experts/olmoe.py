"""OLMoE."""

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
from lmlib.hf.families.olmo import QUERY_KEY_NORMS
from lmlib.hf.family import Family
from lmlib.hf.names import Names
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.experts.olmoe import olmoe

_LAYER = (*ATTENTION, *NORMS_BEFORE, *QUERY_KEY_NORMS, *mixture())


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("clip_qkv")
    rope = read_rope(settings)
    return {
        **sizes(settings, epsilon=1e-5),
        **routing(settings, experts=64, top=8),
        "normalized": settings.take("norm_topk_prob", False, bool),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
    }


def _settings(model: Decoder) -> dict[str, Any]:
    return {
        **shared_settings(model, feed_forward=Mixture),
        **routing_settings(model),
        "norm_topk_prob": mixtures(model)[0].router.normalized,
        "attention_bias": False,
        "clip_qkv": None,
        "pad_token_id": None,  # its class would take 1, whose row of the table it never trains
    }


FAMILIES: Sequence[Family] = (
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        olmoe,
        Names(OUTSIDE, _LAYER, in_class=IN_CLASS),
        _arguments,
        _settings,
    ),
)
