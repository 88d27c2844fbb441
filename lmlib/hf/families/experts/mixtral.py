"""Mixtral."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.experts.mixtures import IN_CLASS, mixture, routing, routing_settings
from lmlib.hf.families.llama import ATTENTION, NORMS_BEFORE, OUTSIDE, shared_settings, sizes
from lmlib.hf.family import Family
from lmlib.hf.names import Names
from lmlib.hf.parts import attentions, head_dim
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.experts.mixtral import mixtral

_LAYER = (*ATTENTION, *NORMS_BEFORE, *mixture("block_sparse_moe", ("w1", "w3", "w2")))


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    rope = read_rope(settings, 1_000_000.0)
    return {
        **sizes(settings, kv_heads=8, epsilon=1e-5),
        **routing(settings, experts=8, top=2),
        "head_dim": settings.take("head_dim", None),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "window": settings.take("sliding_window", None),
    }


def _settings(model: Decoder) -> dict[str, Any]:
    return {
        **shared_settings(model, feed_forward=Mixture),
        **routing_settings(model, "num_local_experts"),
        "head_dim": head_dim(model),
        "sliding_window": attentions(model)[0].window,
    }


FAMILIES: Sequence[Family] = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        mixtral,
        Names(OUTSIDE, _LAYER, in_class=IN_CLASS),
        _arguments,
        _settings,
    ),
)
