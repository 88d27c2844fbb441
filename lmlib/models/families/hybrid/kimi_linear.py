"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): Kimi Delta Attention, and attention in every
fourth layer and the last, without positions."""

import functools
from collections.abc import Sequence
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.experts.deepseek import (
    CORRECTION_RATE,
    LATENT_ATTENTION,
    of_shared_experts,
)
from lmlib.models.families.hugging_face import mixtures, parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.hugging_face.parts import FULL, of_first
from lmlib.models.families.hugging_face.settings import FolderError, Settings
from lmlib.models.families.hybrid.alternating import every_nth, mixers
from lmlib.models.families.transformer import check_sizes, transformer
from lmlib.models.parts.latent_attention import LatentAttention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.recurrent.kimi_delta import KimiDelta


def kimi_linear(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    expert_mlp: int,
    experts: int = 256,
    top: int = 8,
    shared_experts: int = 1,
    dense_layers: int = 1,
    groups: int = 1,
    top_groups: int = 1,
    normalized: bool = True,
    share_scale: float = 2.446,
    correction_rate: float = 1e-3,
    attention_layers: Sequence[int] | None = None,
    linear_heads: int = 32,
    linear_head_dim: int = 128,
    width: int = 4,
    head_dim: int = 128,
    shared_dim: int = 64,
    value_dim: int = 128,
    latent: int = 512,
    query_latent: int | None = None,
    norm_epsilon: float = 1e-5,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Kimi Linear (§5).

    Differences from DeepSeek-V3: most layers have a `KimiDelta`; no positions are rotated.

    Args:
      mlp, expert_mlp, experts, top, shared_experts, dense_layers, groups, top_groups, normalized,
      share_scale, correction_rate: as in `lmlib.models.families.experts.deepseek.deepseek_v3`.
      attention_layers: indices of the layers with attention, from 0; `None`: every fourth, and
        the last.
      linear_heads, linear_head_dim, width: sizes of `KimiDelta`; a head's keys, values and latents
        have one size.
      head_dim, shared_dim, value_dim, latent, query_latent: sizes of attention, as in
        `lmlib.models.parts.latent_attention.LatentAttention`, where `shared_dim` is `rotary_dim`.
      norm_epsilon: epsilon of all norms except the latents' norms, which have 1e-6.
    """
    check_sizes(
        layers=layers, expert_mlp=expert_mlp, shared_experts=shared_experts,
        linear_heads=linear_heads, linear_head_dim=linear_head_dim, width=width, head_dim=head_dim,
        shared_dim=shared_dim, value_dim=value_dim, latent=latent,
    )  # fmt: skip
    if not 0 <= dense_layers <= layers:
        raise ValueError(f"dense_layers must be 0 to layers = {layers}, got {dense_layers}")
    if attention_layers is None:
        attention_layers = tuple({**dict.fromkeys(every_nth(4, layers)), layers - 1: None})

    def attention(
        embed: int, heads: int, kv_heads: int, head_dim: int, *, window: None, **others: Any
    ) -> LatentAttention:
        sizes = head_dim, shared_dim, value_dim, latent, query_latent
        return LatentAttention(embed, heads, *sizes, **others)

    def recurrent(embed: int, **others: Any) -> KimiDelta:
        sizes = linear_heads, linear_head_dim, linear_head_dim, linear_head_dim, width
        return KimiDelta(embed, *sizes, epsilon=norm_epsilon, **others)

    def experts_of_size(embed: int, mlp: int, **others: Any) -> Mixture:
        router = functools.partial(
            Router, scores="sigmoid", normalized=normalized, scale=share_scale, groups=groups,
            top_groups=top_groups, correction_rate=correction_rate,
        )  # fmt: skip
        return Mixture(
            embed, expert_mlp, experts=experts, top=top, shared_mlp=shared_experts * expert_mlp,
            router=router, **others,
        )  # fmt: skip

    return transformer(
        vocab, embed, layers, heads, mlp, None, head_dim, norm_epsilon=norm_epsilon,
        attention=mixers(layers, attention_layers, attention, recurrent),
        feed_forward=[GatedMLP] * dense_layers + [experts_of_size] * (layers - dense_layers),
        rotary_layers=False, key=key,
    )  # fmt: skip


_KEYS_OF_HEADS = ("heads key_dim", "embed")
_FILTERS = tuple(
    Tensor(f"self_attn.{name[0]}_conv1d.weight", {f"attention.{name}_filter": (axes, "", "width")})
    for name, axes in (
        ("query", "heads key_dim"), ("key", "heads key_dim"), ("value", "heads value_dim")
    )
)  # fmt: skip
_MODULE, _MATRICES = "block_sparse_moe", ("w1", "w3", "w2")


def _gates(module: str) -> tuple[Tensor, ...]:
    """Returns the tensors of the decay, in `module`."""
    return (
        Tensor(f"{module}.f_a_proj.weight", {"attention.time_down": ("latent", "embed")}),
        Tensor(f"{module}.f_b_proj.weight", {"attention.time_up": ("heads key_dim", "latent")}),
        Tensor(f"{module}.dt_bias", {"attention.time_bias": ("heads key_dim",)}),
        Tensor(f"{module}.A_log", {"attention.log_rate": ("", "", "heads", "")}),
    )


_LAYER = (
    *shared.NORMS_BEFORE,
    *LATENT_ATTENTION,
    Tensor("self_attn.q_proj.weight", {"attention.query": _KEYS_OF_HEADS}),
    Tensor("self_attn.k_proj.weight", {"attention.key": _KEYS_OF_HEADS}),
    Tensor("self_attn.v_proj.weight", {"attention.value": ("heads value_dim", "embed")}),
    *_FILTERS,
    *_gates("self_attn"),
    Tensor("self_attn.b_proj.weight", {"attention.rate": ("heads", "embed")}),
    Tensor("self_attn.g_a_proj.weight", {"attention.gate_down": ("latent", "embed")}),
    Tensor("self_attn.g_b_proj.weight", {"attention.gate_up": ("heads value_dim", "latent")}),
    Tensor("self_attn.o_norm.weight", {"attention.norm.scale": ("head_dim",)}),
    *shared.MLP,
    *mixtures.tensors(_MODULE, _MATRICES),
    *of_shared_experts(_MODULE),
)
_IN_CLASS = (
    *mixtures.IN_CLASS,
    *of_shared_experts(),
    Tensor(
        "self_attn.conv1d.weight",
        {path: axes for each in _FILTERS for path, axes in each.holds.items()},
    ),
    *_gates("self_attn.forget_gate"),
)
_FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias")
LINEAR, DENSE, SPARSE = "linear_attention", "dense", "sparse"
# By argument: the key in `linear_attn_config` and outside, and the default.
_LINEAR_SIZES = {
    "linear_heads": ("num_heads", "linear_num_heads", 32),
    "linear_head_dim": ("head_dim", "linear_head_dim", 128),
    "width": ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
}


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    layers = arguments["layers"]
    # Null means as many as `heads`; an absent key would mean 32, even with other `heads`.
    if settings.take("num_key_value_heads", 32, null=True) not in (None, arguments["heads"]):
        raise settings.refused("num_key_value_heads", f"only {arguments['heads']}")
    content = settings.take("linear_attn_config", ..., dict)
    where = f"{settings.where}: linear_attn_config"
    linear = Settings({} if content is ... else content, where, frozenset())
    found = {
        name: linear.take(inside, settings.take(outside, usual))
        for name, (inside, outside, usual) in _LINEAR_SIZES.items()
    }
    kinds, mlps = (
        _kinds(settings, key, layers, known)
        for key, known in (("layer_types", (LINEAR, FULL)), ("mlp_layer_types", (DENSE, SPARSE)))
    )
    listed = {
        kind: linear.take(f"{name}_layers", ..., list)
        for kind, name in ((LINEAR, "kda"), (FULL, "full_attn"))
    }
    linear.done()
    if ... not in listed.values():
        numbers = [*listed[LINEAR], *listed[FULL]]
        if {*map(type, numbers)} != {int} or sorted(numbers) != [*range(1, layers + 1)]:
            raise FolderError(
                f"{where}: kda_layers and full_attn_layers must have each of the numbers 1 to "
                f"{layers} once"
            )
        stated = [LINEAR if layer in listed[LINEAR] else FULL for layer in range(1, layers + 1)]
        if kinds not in (None, stated):
            raise FolderError(f"{where} and layer_types contradict each other")
    else:  # as in transformers
        stated = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
    attends = (i for i, kind in enumerate(kinds or stated) if kind == FULL)
    found["attention_layers"] = tuple(attends)
    dense = min(settings.take("first_k_dense_replace", 1, zero=True), layers)
    if mlps is not None:
        dense = mlps.count(DENSE)
        if mlps != [DENSE] * dense + [SPARSE] * (layers - dense):
            raise settings.refused("mlp_layer_types", f"only {DENSE!r} layers before all others")
        settings.only("first_k_dense_replace", dense)
    return {**found, "dense_layers": dense}


def _kinds(settings: Settings, key: str, layers: int, known: Sequence[str]) -> list[str] | None:
    kinds: list[str] | None = settings.take(key, None, list)
    if kinds is None or (len(kinds) == layers and all(kind in known for kind in kinds)):
        return kinds
    either = " or ".join(map(repr, known))
    raise settings.refused(key, f"only {either} for each of {layers} layers")


def _written(model: Decoder) -> dict[str, Any]:
    is_linear = [isinstance(layer.attention, KimiDelta) for layer in parts.layers(model)]
    found = of_first(KimiDelta, lambda part: (*part.key.shape[-2:], part.width))(model)
    keys = [inside for inside, _, _ in _LINEAR_SIZES.values()]
    linear = {} if found is ... else dict(zip(keys, found, strict=True))
    linear |= {
        "kda_layers": [i for i, each in enumerate(is_linear, 1) if each],
        "full_attn_layers": [i for i, each in enumerate(is_linear, 1) if not each],
    }
    heads = _HEADS(model)
    dense = sum(isinstance(layer.mlp, GatedMLP) for layer in parts.layers(model))
    return {
        "linear_attn_config": linear,
        "first_k_dense_replace": dense,
        **({} if heads is ... else {"num_key_value_heads": heads}),
    }


def _of_attention(field: str, axis: int) -> Any:
    return of_first(LatentAttention, lambda part: getattr(part, field).shape[axis])


def _of_router(name: str) -> Any:
    return of_first(Mixture, lambda part: getattr(part.router, name))


_HEADS = _of_attention("output", -3)
_KEYS = (
    shared.VOCAB,
    shared.EMBED,
    shared.LAYERS,
    Key("num_attention_heads", "heads", _HEADS, 32),
    Key("intermediate_size", "mlp", of_first(GatedMLP, lambda mlp: mlp.down.shape[-2]), 9_216),
    Key(
        "moe_intermediate_size", "expert_mlp",
        of_first(Mixture, lambda mlp: mlp.experts.down.shape[-2]), 1_024,
    ),
    Key("num_experts", "experts", _of_router("experts"), 256, also=("num_local_experts",)),
    Key("num_experts_per_token", "top", _of_router("top"), 8, also=("num_experts_per_tok",)),
    Key(
        "num_shared_experts", "shared_experts",
        of_first(Mixture, lambda mlp: mlp.shared.down.shape[-2] // mlp.experts.down.shape[-2]),
        1, also=("n_shared_experts",),
    ),
    Key("num_expert_group", "groups", _of_router("groups"), 1, also=("n_group",)),
    Key("topk_group", "top_groups", _of_router("top_groups"), 1),
    Key("moe_renormalize", "normalized", _of_router("normalized"), True, bool, null=True),
    Key("routed_scaling_factor", "share_scale", _of_router("scale"), 2.446, float),
    CORRECTION_RATE,
    Key("qk_nope_head_dim", "head_dim", _of_attention("key", -1), 128),
    Key("qk_rope_head_dim", "shared_dim", _of_attention("rotary_key", -1), 64),
    Key("v_head_dim", "value_dim", _of_attention("value", -1), 128),
    Key("kv_lora_rank", "latent", _of_attention("down", -1), 512),
    Key(
        "q_lora_rank", "query_latent",
        of_first(LatentAttention, lambda part: getattr(part.query_down, "shape", [None])[-1]),
        None, null=True,
    ),
    shared.epsilon("rms_norm_eps", 1e-5),
)  # fmt: skip

FAMILIES = (
    Family(
        "kimi_linear", "KimiLinearForCausalLM", kimi_linear,
        Names(
            shared.OUTSIDE, _LAYER, in_class=_IN_CLASS,
            in_float32=dict.fromkeys(("bfloat16", "float16"), _FLOAT32),
            # transformers 5.23 writes the MLPs of dense layers as if they were experts.
            renamed={f".{_MODULE}.{name}.": f".mlp.{name}." for name in mixtures.GATE_UP_DOWN},
        ),
        _KEYS, rope=None, 
        # transformers does not tie tables, other readers do.
        fixed=shared.SILU | {"attention_bias": False, "tie_word_embeddings": False},
        only={  # transformers does not read these either
            "moe_router_activation_func": ("sigmoid", None),
            "mla_use_nope": (True, None),
            "use_grouped_topk": (True, None),
            "moe_layer_freq": (1, None),
        },
        # These concern positions, losses in training and multi-token prediction, or are sums of
        # other keys. Tensors for multi-token prediction are refused as unknown.
        ignored=(
            "model_max_length", "max_position_embeddings", "rope_theta", "rope_scaling",
            "rope_parameters", "output_router_logits", "num_nextn_predict_layers", "head_dim",
            "qk_head_dim",
        ),
        written=shared.NO_PADDING | {  # the class's padding may be outside the vocabulary
            "moe_router_activation_func": "sigmoid",
            "mla_use_nope": True,
            "use_grouped_topk": True,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
        },
        reads=_read, writes=_written,
    ),
)  # fmt: skip
