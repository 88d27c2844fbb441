"""StarCoder 2."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.llama import ATTENTION, NORMS_BEFORE, OUTSIDE, shared_settings, sizes
from lmlib.hf.families.qwen import BIASES
from lmlib.hf.family import Family
from lmlib.hf.names import Names, Tensor
from lmlib.hf.parts import attentions
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import LARGEST_EPSILON, Settings
from lmlib.models.decoder import Decoder
from lmlib.models.families.starcoder import starcoder2
from lmlib.models.parts.mlp import MLP
from lmlib.models.parts.norms import LayerNorm

_OUTSIDE = (*OUTSIDE, Tensor("model.norm.bias", {"norm.bias": ("embed",)}))
_LAYER = (
    *ATTENTION,
    *NORMS_BEFORE,
    *BIASES,
    Tensor("self_attn.o_proj.bias", {"attention.output_bias": ("embed",)}),
    Tensor("input_layernorm.bias", {"attention_norm.bias": ("embed",)}),
    Tensor("post_attention_layernorm.bias", {"mlp_norm.bias": ("embed",)}),
    Tensor("mlp.c_fc.weight", {"mlp.up": ("mlp", "embed")}),
    Tensor("mlp.c_fc.bias", {"mlp.up_bias": ("mlp",)}),
    Tensor("mlp.c_proj.weight", {"mlp.down": ("embed", "mlp")}),
    Tensor("mlp.c_proj.bias", {"mlp.down_bias": ("embed",)}),
)


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "gelu_pytorch_tanh")
    settings.only("use_bias", True)
    settings.only("norm_type", "layer_norm", None)
    settings.only("mlp_type", "default", None)
    # The 7B says some things twice, in the words of StarCoder 1; `transformers` reads none of them.
    epsilon = settings.take("norm_epsilon", 1e-5, float, most=LARGEST_EPSILON)
    settings.only("layer_norm_epsilon", epsilon, None)
    settings.only("activation_function", "gelu", "gelu_pytorch_tanh", None)
    settings.only("scale_attn_weights", True, None)
    settings.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    return {
        **sizes(settings, tied=True, kv_heads=2),
        "rope_theta": read_rope(settings, scalings=()).theta,
        "norm_epsilon": epsilon,
        "window": settings.take("sliding_window", None),
    }


def _settings(model: Decoder) -> dict[str, Any]:
    shared = shared_settings(model, "gelu_pytorch_tanh", norm=LayerNorm, feed_forward=MLP)
    return shared | {
        "norm_epsilon": shared.pop("rms_norm_eps"),
        "sliding_window": attentions(model)[0].window,
        "use_bias": True,
    }


FAMILIES: Sequence[Family] = (
    Family(
        "starcoder2", "Starcoder2ForCausalLM", starcoder2, Names(_OUTSIDE, _LAYER),
        _arguments, _settings,
    ),
)  # fmt: skip
