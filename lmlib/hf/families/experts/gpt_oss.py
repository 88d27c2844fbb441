"""gpt-oss, whose files hold the gates and ups of all experts in one tensor, column by column."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.experts.mixtures import routing, routing_settings
from lmlib.hf.families.layer_types import FULL, SLIDING, layer_types
from lmlib.hf.families.llama import ATTENTION, NORMS_BEFORE, OUTSIDE, shared_settings, sizes
from lmlib.hf.families.qwen import BIASES
from lmlib.hf.family import Family
from lmlib.hf.folder import FolderError
from lmlib.hf.names import Names, Tensor
from lmlib.hf.parts import attentions, head_dim
from lmlib.hf.rope_settings import read_rope
from lmlib.hf.settings import Settings
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.experts.gpt_oss import gpt_oss, in_turn

_LAYER = (
    *ATTENTION,
    *NORMS_BEFORE,
    *BIASES,
    Tensor("self_attn.o_proj.bias", {"attention.output_bias": ("embed",)}),
    Tensor("self_attn.sinks", {"attention.sinks": ("heads",)}),
    Tensor("mlp.router.weight", {"mlp.router.logits": ("choice", "embed")}),
    Tensor("mlp.router.bias", {"mlp.router.bias": ("choice",)}),
    Tensor(
        "mlp.experts.gate_up_proj",
        {f"mlp.experts.{name}": ("expert", "embed", "mlp") for name in ("gate", "up")},
        along=2,
        each="mlp",
    ),
    Tensor(
        "mlp.experts.gate_up_proj_bias",
        {f"mlp.experts.{name}_bias": ("expert", "mlp") for name in ("gate", "up")},
        along=1,
        each="mlp",
    ),
    Tensor("mlp.experts.down_proj", {"mlp.experts.down": ("expert", "mlp", "embed")}),
    Tensor("mlp.experts.down_proj_bias", {"mlp.experts.down_bias": ("expert", "embed")}),
)
_USUAL_WINDOW = 128
_USUAL_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4_096,
}
_GATE = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # of clamped_swiglu


def _arguments(settings: Settings) -> dict[str, Any]:
    _refuse_quantized(settings)
    settings.only("attention_bias", True)
    for key, value in _GATE.items():
        settings.only(key, value)
    settings.ignore("experts_per_token", "initial_context_length")  # the file says them elsewhere
    arguments, rope = (
        sizes(settings, kv_heads=8, epsilon=1e-5),
        read_rope(settings, 150_000.0, absent=_USUAL_ROPE),
    )
    return {
        **arguments,
        **routing(settings, experts=128, top=4),
        "head_dim": settings.take("head_dim", 64),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "window": _window(settings, arguments["layers"]),
    }


def _refuse_quantized(settings: Settings) -> None:
    quantized = settings.take("quantization_config", None, dict)
    if quantized is not None:
        raise FolderError(
            f"{settings.where}: the experts are quantized "
            f"({quantized.get('quant_method')!r:.200}), which is not read here: dequantize them "
            "with transformers first, by from_pretrained(…, quantization_config="
            "Mxfp4Config(dequantize=True)).save_pretrained(…, save_original_format=False)"
        )


def _window(settings: Settings, layers: int) -> int | list[int | None] | None:
    window = settings.nullable("sliding_window", _USUAL_WINDOW)
    kinds = layer_types(settings, layers)
    if window is None and (kinds is None or SLIDING in kinds):
        settings.take("sliding_window")  # which refuses null
    usual = in_turn(window, layers)
    windows = usual if kinds is None else [window if kind == SLIDING else None for kind in kinds]
    return window if windows == usual else windows


def _settings(model: Decoder) -> dict[str, Any]:
    windows = [mixer.window for mixer in attentions(model)]
    used = next((window for window in windows if window is not None), _USUAL_WINDOW)
    return {
        "rope_scaling": None,  # left out, it means the usual one to older readers
        **shared_settings(model, feed_forward=Mixture),
        **routing_settings(model, "num_local_experts"),
        **_GATE,
        "head_dim": head_dim(model),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": used,
        "attention_bias": True,
    }


FAMILIES: Sequence[Family] = (
    Family(
        "gpt_oss", "GptOssForCausalLM", gpt_oss,
        Names(OUTSIDE, _LAYER, in_float32={"float16": ("norm",)}),
        _arguments, _settings,
    ),
)  # fmt: skip
