"""gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

import functools
from collections.abc import Sequence
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.mlps import GatedExperts, clamped_swiglu
from lmlib.models.experts.router import Router
from lmlib.models.families.hugging_face import mixtures, parts, shared
from lmlib.models.families.hugging_face.family import Family, Names, Tensor
from lmlib.models.families.hugging_face.parts import SLIDING
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.llama import llama
from lmlib.models.families.variants import variant
from lmlib.models.families.windows import each_nth
from lmlib.models.parts.attention import Attention


@variant(without="rotary_fraction")
def gpt_oss(
    *,
    layers: int,
    head_dim: int | None = 64,
    rope_theta: float = 150_000.0,
    window: int | Sequence[int | None] | None = 128,
    experts: int = 128,
    top: int = 4,
    **others: Any,
) -> Decoder:
    """gpt-oss (§2).

    Differences from Llama: a mixture of experts of size `mlp`, with clamped gates; the softmax over
    the logits of a token's `top` experts as shares; biases everywhere except in norms; attention
    with sinks. `window` is for every other layer, starting with the first, or one for each layer.
    """
    if window is None or isinstance(window, int):
        window = _in_turn(window, layers)
    mixture = functools.partial(
        Mixture, experts=experts, top=top,
        router=functools.partial(Router, normalized=True, bias=True),
        mlps=functools.partial(GatedExperts, gated=clamped_swiglu, bias=True),
    )  # fmt: skip
    return llama(
        layers=layers, head_dim=head_dim, rope_theta=rope_theta, window=window,
        attention=functools.partial(Attention, bias=True, output_bias=True, sinks=True),
        feed_forward=mixture, **others,
    )  # fmt: skip


def _in_turn(window: int | None, layers: int) -> list[int | None]:
    return [None if each else window for each in each_nth(2, layers)]


_LAYER = (
    *shared.ATTENTION,
    *shared.NORMS_BEFORE,
    *shared.BIASES,
    shared.OUTPUT_BIAS,
    Tensor("self_attn.sinks", {"attention.sinks": ("heads",)}),
    Tensor("mlp.router.weight", {"mlp.router.logits": ("choice", "embed")}),
    Tensor("mlp.router.bias", {"mlp.router.bias": ("choice",)}),
    # Gates and ups of all experts are in one tensor, with alternating columns.
    Tensor(
        "mlp.experts.gate_up_proj",
        {f"mlp.experts.{name}": ("experts", "embed", "mlp") for name in ("gate", "up")},
        along=2,
        each="mlp",
    ),
    Tensor(
        "mlp.experts.gate_up_proj_bias",
        {f"mlp.experts.{name}_bias": ("experts", "mlp") for name in ("gate", "up")},
        along=1,
        each="mlp",
    ),
    Tensor("mlp.experts.down_proj", {"mlp.experts.down": ("experts", "mlp", "embed")}),
    Tensor("mlp.experts.down_proj_bias", {"mlp.experts.down_bias": ("experts", "embed")}),
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
_OF_THE_GATE = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as in `clamped_swiglu`


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    size = settings.take("sliding_window", _USUAL_WINDOW, null=True)
    kinds = parts.layer_types(settings, arguments["layers"])
    if size is None and (kinds is None or SLIDING in kinds):
        settings.take("sliding_window")  # refuses null
    usual = _in_turn(size, arguments["layers"])
    windows = usual if kinds is None else [size if kind == SLIDING else None for kind in kinds]
    return {"window": size if windows == usual else windows}


def _written(model: Decoder) -> dict[str, Any]:
    return {
        "layer_types": parts.types_of(model),
        "sliding_window": parts.window(model) or _USUAL_WINDOW,
    }


FAMILIES = (
    Family(
        "gpt_oss", "GptOssForCausalLM", gpt_oss,
        Names(shared.OUTSIDE, _LAYER, in_float32={"float16": ("norm",)}),
        mixtures.mixture_keys(
            shared.HEAD_DIM._replace(default=64), experts=128, top=4, count="num_local_experts",
            kv_heads=8, norm=shared.epsilon("rms_norm_eps", 1e-5),
        ),
        Rope(150_000.0, absent=_USUAL_ROPE),
        fixed=shared.SILU | {"attention_bias": True} | _OF_THE_GATE,
        # The first two repeat other keys.
        ignored=("experts_per_token", "initial_context_length", *mixtures.IGNORED),
        written={"rope_scaling": None},  # if absent, older readers use their own
        reads=_read, writes=_written,
    ),
)  # fmt: skip
