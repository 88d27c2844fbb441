"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437) and Moonlight.

Latent attention, and mixtures of experts after a few dense layers. Moonlight lacks query latents.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.hugging_face import mixtures, multi_token_prediction, parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.transformer import check_sizes, transformer
from lmlib.models.multi_token import multi_token
from lmlib.models.parts.latent_attention import LatentAttention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary
from lmlib.models.parts.rope_scaling import Yarn, yarn_amplitude


def deepseek_v3(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    expert_mlp: int,
    experts: int = 256,
    top: int = 8,
    shared_experts: int = 1,
    dense_layers: int = 3,
    groups: int = 8,
    top_groups: int = 4,
    normalized: bool = True,
    share_scale: float = 2.5,
    correction_rate: float = 1e-3,
    head_dim: int = 128,
    rotary_dim: int = 64,
    value_dim: int = 128,
    latent: int = 512,
    query_latent: int | None = 1_536,
    rope_theta: float = 10_000.0,
    rope_scaling: Yarn | None = None,
    score_sharpness: float = 0.0,
    interleaved: bool = True,
    norm_epsilon: float = 1e-6,
    tied: bool = False,
    multi_token_depths: int | None = None,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """DeepSeek-V3 (§2.1).

    Args:
      mlp, dense_layers: the first `dense_layers` layers have an MLP of size `mlp` and no experts.
      expert_mlp, shared_experts: size of each expert, and the number of experts that all tokens
        use; these form one MLP.
      experts, top, groups, top_groups, normalized, correction_rate: as in
        `lmlib.models.experts.router.Router`, with the sigmoid of the logits as scores.
      share_scale: the sum of a token's shares, if they are `normalized`.
      head_dim, rotary_dim, value_dim, latent, query_latent: as in
        `lmlib.models.parts.latent_attention.LatentAttention`.
      rope_scaling: DeepSeek-V3 has a `Yarn` with an amplitude of 1.
      score_sharpness: m; with a `rope_scaling`, all scores are multiplied by (0.1 m ln(factor) +
        1)². DeepSeek-V3 has 1.
      norm_epsilon: epsilon of all norms except the latents' norms, which have 1e-6.
      multi_token_depths: number of heads for further tokens (§2.2); DeepSeek-V3 has 1.
    """
    check_sizes(
        expert_mlp=expert_mlp, rotary_dim=rotary_dim, value_dim=value_dim, latent=latent,
        head_dim=head_dim,
    )  # fmt: skip
    if not 0 <= dense_layers <= layers or shared_experts < 0:
        raise ValueError(
            f"dense_layers must be 0 to layers = {layers}, and shared_experts at least 0, got "
            f"{dense_layers} and {shared_experts}"
        )
    sharpness = (
        1.0 if rope_scaling is None else yarn_amplitude(rope_scaling.factor, score_sharpness)
    )
    scale = sharpness**2 / math.sqrt(head_dim + rotary_dim)

    def attention(
        embed: int, heads: int, kv_heads: int, head_dim: int, *, window: None, **others: Any
    ) -> LatentAttention:
        sizes = head_dim, rotary_dim, value_dim, latent, query_latent
        return LatentAttention(embed, heads, *sizes, scale=scale, **others)

    mixture = functools.partial(
        Mixture, experts=experts, top=top, shared_mlp=shared_experts * expert_mlp or None,
        router=functools.partial(
            Router, scores="sigmoid", normalized=normalized, scale=share_scale,
            groups=groups, top_groups=top_groups, correction_rate=correction_rate,
        ),
    )  # fmt: skip

    def experts_of_size(embed: int, mlp: int, **others: Any) -> Mixture:
        return mixture(embed, expert_mlp, **others)

    decoder = functools.partial(
        transformer, vocab, embed, layers, heads, mlp, None, head_dim, norm_epsilon=norm_epsilon,
        tied=tied, attention=attention,
        feed_forward=[GatedMLP] * dense_layers + [experts_of_size] * (layers - dense_layers),
        rotary_layers=Rotary(rotary_dim, rope_theta, rope_scaling, interleaved),
    )  # fmt: skip
    norm = functools.partial(RMSNorm, epsilon=norm_epsilon)
    return multi_token(decoder, multi_token_depths or 0, norm, key=key)


_LAYER = (
    *shared.NORMS_BEFORE,
    Tensor("self_attn.q_proj.weight", {"attention.query": ("heads query_dim", "embed")}),
    Tensor("self_attn.q_a_proj.weight", {"attention.query_down": ("latent", "embed")}),
    Tensor("self_attn.q_a_layernorm.weight", {"attention.query_norm.scale": ("latent",)}),
    Tensor("self_attn.q_b_proj.weight", {"attention.query_up": ("heads query_dim", "latent")}),
    Tensor(
        "self_attn.kv_a_proj_with_mqa.weight",
        {"attention.down": ("latent", "embed"), "attention.rotary_key": ("rotary_dim", "embed")},
    ),
    Tensor("self_attn.kv_a_layernorm.weight", {"attention.norm.scale": ("latent",)}),
    Tensor(
        "self_attn.kv_b_proj.weight",
        {
            "attention.key": ("heads head_dim", "latent"),
            "attention.value": ("heads value_dim", "latent"),
        },
        each="heads",
    ),
    Tensor("self_attn.o_proj.weight", {"attention.output": ("embed", "heads value_dim")}),
    *shared.MLP,
    *mixtures.tensors(),
    Tensor("mlp.gate.e_score_correction_bias", {"mlp.router.correction": ("choice",)}),
    Tensor("mlp.shared_experts.gate_proj.weight", {"mlp.shared.gate": ("mlp", "embed")}),
    Tensor("mlp.shared_experts.up_proj.weight", {"mlp.shared.up": ("mlp", "embed")}),
    Tensor("mlp.shared_experts.down_proj.weight", {"mlp.shared.down": ("embed", "mlp")}),
)
_RATE = "bias_update_speed"  # lmlib's own key, named as in the paper
_USUAL_RATE = 1e-3
_SHARPNESS = "mscale_all_dim"
_ROPE = Rope(scalings=(Yarn,), kind="type")


def _attention(model: Decoder) -> LatentAttention:
    return parts.a(LatentAttention, parts.layers(model)[0].attention)


def _size(model: Decoder, kind: type[Any]) -> int:
    """Returns the size of MLPs or of experts; if the model has none, the size of the other kind."""
    sizes = dict[type, Any]()
    for layer in parts.layers(model):
        sizes[type(layer.mlp)] = getattr(layer.mlp, "experts", layer.mlp)
    return int(sizes.get(kind, next(iter(sizes.values()))).down.shape[-2])


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    # Null means as many as `heads`; an absent key would mean 128, even with other `heads`.
    if settings.take("num_key_value_heads", null=True) is not None:
        settings.only("num_key_value_heads", arguments["heads"])
    # The rope's other settings are read from the same of the two keys.
    new, old = (settings.take(key, {}, dict) for key in ("rope_parameters", "rope_scaling"))
    sharpness = float((old or new).get(_SHARPNESS) or 0.0)
    return {**_ROPE.arguments(settings), "score_sharpness": sharpness}


def _written(model: Decoder) -> dict[str, Any]:
    attention = _attention(model)
    rotary = attention.rotary
    content = {
        "num_key_value_heads": attention.output.shape[-3],
        **_ROPE.settings(rotary, rotary.head_dim),
    }
    return content | _sharper(attention, content)


def _sharper(attention: LatentAttention, content: dict[str, Any]) -> dict[str, Any]:
    """Returns `mscale` and `mscale_all_dim`, which older readers use for amplitude and scale."""
    scaling = attention.rotary.scaling
    if attention.scale is None or not isinstance(scaling, Yarn) or scaling.factor == 1:
        return {}
    query_dim = attention.key.shape[-1] + attention.rotary_key.shape[-1]
    sharper = math.sqrt(attention.scale * math.sqrt(query_dim))

    def written(amplitude: float) -> float:
        return round((amplitude - 1) / (0.1 * math.log(scaling.factor)), 9)

    if not (sharpness := written(sharper)):
        return {}
    of_both = {"mscale": written(scaling.amplitude * sharper), _SHARPNESS: sharpness}
    return {key: content[key] | of_both for key in ("rope_parameters", "rope_scaling")}


def _of_router(name: str) -> Callable[[Decoder], Any]:
    """Returns a function that reads a setting of the last layer's router, or `...` without one."""
    return lambda model: getattr(getattr(parts.layers(model)[-1].mlp, "router", None), name, ...)


def _correction_rate(model: Decoder) -> Any:
    rate = _of_router("correction_rate")(model)
    return ... if rate == _USUAL_RATE else rate


def _shared_experts(model: Decoder) -> Any:
    mlp = parts.layers(model)[-1].mlp
    if not isinstance(mlp, Mixture):
        return ...
    return parts.a(GatedMLP, mlp.shared).down.shape[-2] // _size(model, Mixture)


def _latent(model: Decoder) -> int | None:
    down = _attention(model).query_down
    return None if down is None else int(down.shape[-1])


_KEYS = (
    shared.VOCAB,
    shared.EMBED,
    shared.LAYERS,
    Key("num_attention_heads", "heads", lambda model: _attention(model).output.shape[-3]),
    Key("intermediate_size", "mlp", lambda model: _size(model, GatedMLP)),
    Key("moe_intermediate_size", "expert_mlp", lambda model: _size(model, Mixture)),
    Key("n_routed_experts", "experts", _of_router("experts"), 256),
    Key("num_experts_per_tok", "top", _of_router("top"), 8),
    Key("n_shared_experts", "shared_experts", _shared_experts, 1),
    Key(
        "first_k_dense_replace", "dense_layers",
        lambda model: sum(isinstance(each.mlp, GatedMLP) for each in parts.layers(model)),
        3, zero=True,
    ),
    Key("n_group", "groups", _of_router("groups"), 8),
    Key("topk_group", "top_groups", _of_router("top_groups"), 4),
    Key("norm_topk_prob", "normalized", _of_router("normalized"), True, bool, null=True),
    Key("routed_scaling_factor", "share_scale", _of_router("scale"), 2.5, float),
    Key(_RATE, "correction_rate", _correction_rate, _USUAL_RATE, float, zero=True),
    Key("qk_nope_head_dim", "head_dim", lambda model: _attention(model).key.shape[-1], 128),
    Key("qk_rope_head_dim", "rotary_dim", lambda model: _attention(model).rotary.head_dim, 64),
    Key("v_head_dim", "value_dim", lambda model: _attention(model).value.shape[-1], 128),
    Key("kv_lora_rank", "latent", lambda model: _attention(model).down.shape[-1], 512),
    Key(
        "rope_interleave", "interleaved", lambda model: _attention(model).rotary.interleaved,
        True, bool, null=True,
    ),
    Key("q_lora_rank", "query_latent", _latent, 1_536, null=True),
    shared.EPSILON,
    shared.tied(False),
    multi_token_prediction.KEY,
)  # fmt: skip


FAMILIES = (
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", deepseek_v3,
        Names(
            shared.OUTSIDE, _LAYER, in_class=mixtures.IN_CLASS, not_adapted=mixtures.GATE_UP_DOWN,
            in_float32=dict.fromkeys(("bfloat16", "float16"), ("e_score_correction_bias",)),
            heads=multi_token_prediction.tensors("eh_proj", "enorm", "hnorm", "shared_head.norm"),
            repeated={"embed_tokens.weight": "embedding", "shared_head.head.weight": "unembedding"},
        ),
        _KEYS, rope=None, fixed=shared.SILU | {"attention_bias": False},
        only={  # transformers does not read these either
            "scoring_func": ("sigmoid", None),
            "topk_method": ("noaux_tc", None),
            "moe_layer_freq": (1, None),
        },
        # These concern losses and devices in training, or are sums of other keys.
        ignored=(
            "aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "num_mtp_layers",
            "head_dim", "qk_head_dim",
        ),
        written={
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
        reads=_read, writes=_written,
    ),
)  # fmt: skip
