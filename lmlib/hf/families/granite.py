"""Granite 3, dense."""

import math
from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.llama import names, shared_settings, sizes
from lmlib.hf.family import Family
from lmlib.hf.parts import attentions, head_dim, layers
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import Settings
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.granite import granite


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    rope = read_rope(settings)
    return {
        **sizes(settings),
        "head_dim": settings.take("head_dim", None),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "embedding_scale": settings.take("embedding_multiplier", 1.0, float),
        "residual_multiplier": settings.take("residual_multiplier", 1.0, float),
        "attention_scale": settings.take("attention_multiplier", 1.0, float),
        "logits_scale": 1 / settings.take("logits_scaling", 1.0, float),
    }


def _settings(model: Decoder) -> dict[str, Any]:
    return shared_settings(model) | {
        "head_dim": head_dim(model),
        "embedding_multiplier": model.embedding_scale,
        "residual_multiplier": layers(model, Block)[0].residual_multiplier,
        "attention_multiplier": attentions(model)[0].scale,
        "logits_scaling": _inverse(model.logits_scale),
        "attention_bias": False,
        "mlp_bias": False,
    }


def _inverse(scale: float) -> float:
    """The number of which `scale` is the inverse, to the last bit if there is one."""
    near = 1 / scale
    candidates = near, math.nextafter(near, 0.0), math.nextafter(near, math.inf)
    return next((each for each in candidates if 1 / each == scale), near)


FAMILIES: Sequence[Family] = (
    Family("granite", "GraniteForCausalLM", granite, names(), _arguments, _settings),
)
