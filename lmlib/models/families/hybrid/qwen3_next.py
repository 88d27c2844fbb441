"""Qwen3-Next (Qwen Team 2025): Gated DeltaNet, gated attention in every fourth layer, experts."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.experts.gated_shared import GatedSharedExperts
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families.hugging_face import mixtures, multi_token_prediction, parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.hugging_face.parts import FULL
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.hybrid.alternating import every_nth, mixers
from lmlib.models.families.transformer import check_sizes, transformer
from lmlib.models.families.windows import each_nth
from lmlib.models.multi_token import multi_token
from lmlib.models.parts.gated_attention import GatedAttention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Scaling
from lmlib.models.recurrent.gated_deltanet import GatedDeltaNet

LINEAR = "linear_attention"


def qwen3_next(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    expert_mlp: int = 512,
    kv_heads: int = 2,
    head_dim: int = 256,
    experts: int = 512,
    top: int = 10,
    shared_mlp: int = 512,
    normalized: bool = True,
    attention_layers: Sequence[int] | None = None,
    dense_layers: Sequence[int] = (),
    linear_heads: int = 32,
    linear_kv_heads: int = 16,
    linear_key_dim: int = 128,
    linear_value_dim: int = 128,
    width: int = 4,
    rope_theta: float = 10_000_000.0,
    rope_scaling: Scaling | None = None,
    rotary_fraction: float = 0.25,
    norm_epsilon: float = 1e-6,
    tied: bool = False,
    multi_token_depths: int | None = None,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Qwen3-Next.

    Differences from Qwen 3 with experts: layers with a `GatedDeltaNet` instead of attention; a
    gate for each element of attention's output; rotary positions for a fraction of each head's
    coordinates; 1 added to the scale of norms; a shared expert of size `shared_mlp` with a gate.

    Args:
      mlp, dense_layers: the layers of these numbers, from 0, have an MLP of size `mlp`.
      expert_mlp, experts, top, normalized: as in `qwen3_moe`.
      attention_layers: indices of the layers with attention, from 0; `None`: every fourth.
      linear_heads, linear_kv_heads, linear_key_dim, linear_value_dim, width: sizes of
        `GatedDeltaNet`.
      multi_token_depths: 1 for a head that predicts a further token, with attention and experts.
    """
    check_sizes(
        layers=layers, expert_mlp=expert_mlp, shared_mlp=shared_mlp, linear_heads=linear_heads,
        linear_kv_heads=linear_kv_heads, linear_key_dim=linear_key_dim,
        linear_value_dim=linear_value_dim, width=width,
    )  # fmt: skip
    if attention_layers is None:
        attention_layers = every_nth(4, layers)
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon, 1.0)
    attention = functools.partial(GatedAttention, norm=norm)

    def recurrent(embed: int, **others: Any) -> GatedDeltaNet:
        sizes = linear_heads, linear_kv_heads, linear_key_dim, linear_value_dim, width
        return GatedDeltaNet(embed, *sizes, epsilon=norm_epsilon, **others)

    def experts_of_size(embed: int, mlp: int, **others: Any) -> Mixture:
        return Mixture(
            embed, expert_mlp, experts=experts, top=top, shared_mlp=shared_mlp,
            router=functools.partial(Router, normalized=normalized), shared=GatedSharedExperts,
            **others,
        )  # fmt: skip

    of_embed = functools.partial(RMSNorm, offset=1.0)

    def decoder(layers: int, **parts: Any) -> Callable[..., Decoder]:
        return functools.partial(
            transformer, vocab, embed, layers, heads, mlp, kv_heads, head_dim, rope_theta,
            rope_scaling, norm_epsilon, tied, None, rotary_fraction, norm=of_embed, **parts,
        )  # fmt: skip

    whole = decoder(
        layers,
        attention=mixers(layers, attention_layers, attention, recurrent),
        feed_forward=[
            GatedMLP if layer in dense_layers else experts_of_size for layer in range(layers)
        ],
    )
    head = decoder(1, attention=attention, feed_forward=experts_of_size)
    norm = functools.partial(of_embed, epsilon=norm_epsilon)
    return multi_token(whole, multi_token_depths or 0, norm, head, key=key)


_QUERY_KEY = ("kv_heads key_dim", "embed")
_VALUE = ("heads value_dim", "embed")
_LAYER = (
    *shared.NORMS_BEFORE,
    # Queries and gates of a head are adjacent; so are all rows for a key head of a DeltaNet.
    Tensor(
        "self_attn.q_proj.weight",
        {f"attention.{name}": ("heads head_dim", "embed") for name in ("query", "gate")},
        each="heads",
    ),
    *shared.ATTENTION[1:],
    *shared.HEAD_NORMS,
    Tensor(
        "linear_attn.in_proj_qkvz.weight",
        {f"attention.{name}": _QUERY_KEY for name in ("query", "key")}
        | {f"attention.{name}": _VALUE for name in ("value", "gate")},
        each="kv_heads",
    ),
    Tensor(
        "linear_attn.in_proj_ba.weight",
        {f"attention.{name}": ("heads", "embed") for name in ("rate", "time")},
        each="kv_heads",
    ),
    Tensor(
        "linear_attn.conv1d.weight",
        {
            "attention.query_filter": ("kv_heads key_dim", "", "width"),
            "attention.key_filter": ("kv_heads key_dim", "", "width"),
            "attention.value_filter": ("heads value_dim", "", "width"),
        },
    ),
    Tensor("linear_attn.dt_bias", {"attention.time_bias": ("heads",)}),
    Tensor("linear_attn.A_log", {"attention.log_rate": ("heads",)}),
    Tensor("linear_attn.norm.weight", {"attention.norm.scale": ("head_dim",)}),
    Tensor("linear_attn.out_proj.weight", {"attention.output": ("embed", "heads value_dim")}),
    *shared.MLP,
    *mixtures.tensors(),
    Tensor("mlp.shared_expert.gate_proj.weight", {"mlp.shared.gate": ("mlp", "embed")}),
    Tensor("mlp.shared_expert.up_proj.weight", {"mlp.shared.up": ("mlp", "embed")}),
    Tensor("mlp.shared_expert.down_proj.weight", {"mlp.shared.down": ("embed", "mlp")}),
    Tensor("mlp.shared_expert_gate.weight", {"mlp.shared.share": ("one", "embed")}),
)


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    layers, kinds = arguments["layers"], settings.take("layer_types", None, list)
    period = settings.take("full_attention_interval", 4)
    if kinds is not None and (len(kinds) != layers or {*kinds} - {FULL, LINEAR}):
        raise settings.refused(
            "layer_types", f"only {FULL!r} or {LINEAR!r} for each of {layers} layers"
        )
    dense = settings.take("mlp_only_layers", None, list) or []
    sparse = each_nth(settings.take("decoder_sparse_step", 1), layers)
    attends = every_nth(period, layers)
    if kinds is not None:
        attends = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
    return {
        "attention_layers": attends,
        "dense_layers": tuple(i for i in range(layers) if i in dense or not sparse[i]),
    }


def _written(model: Decoder) -> dict[str, Any]:
    layers = parts.layers(model)
    recurrent = [isinstance(layer.attention, GatedDeltaNet) for layer in layers]
    return {
        "layer_types": [LINEAR if each else FULL for each in recurrent],
        "mlp_only_layers": [i for i, each in enumerate(layers) if isinstance(each.mlp, GatedMLP)],
        "decoder_sparse_step": 1,
    }


def _of(field: str, kind: type[Any], value: Callable[[Any], Any]) -> Callable[[Decoder], Any]:
    """Returns a function that reads a size of the first `kind`, or `...` without one.

    Only the head has experts if all layers before it are dense.
    """

    def read(model: Decoder) -> Any:
        patterns = (p for head in getattr(model, "predictors", ()) for p in head.stack.patterns)
        layers = itertools.chain(parts.layers(model), *patterns)
        found = (getattr(layer, field) for layer in layers)
        return next((value(part) for part in found if isinstance(part, kind)), ...)

    return read


def _of_mixture(value: Callable[[Mixture], Any]) -> Callable[[Decoder], Any]:
    return _of("mlp", Mixture, value)


def _of_recurrent(field: str, axis: int) -> Callable[[Decoder], Any]:
    return _of("attention", GatedDeltaNet, lambda part: getattr(part, field).shape[axis])


_KEYS = (
    shared.VOCAB,
    shared.EMBED,
    shared.LAYERS,
    Key("num_attention_heads", "heads", lambda model: parts.attention(model).query.shape[-2], 16),
    Key("num_key_value_heads", "kv_heads", lambda model: parts.attention(model).key.shape[-2], 2),
    shared.HEAD_DIM._replace(default=256),
    Key("intermediate_size", "mlp", _of("mlp", GatedMLP, lambda mlp: mlp.down.shape[-2]), 5_632),
    Key(
        "moe_intermediate_size", "expert_mlp",
        _of_mixture(lambda mlp: mlp.experts.down.shape[-2]), 512,
    ),
    Key(
        "shared_expert_intermediate_size", "shared_mlp",
        _of_mixture(lambda mlp: parts.a(GatedSharedExperts, mlp.shared).down.shape[-2]), 512,
    ),
    Key(
        "num_experts", "experts", _of_mixture(lambda mlp: mlp.router.experts), 512,
        also=("num_local_experts",),
    ),
    Key("num_experts_per_tok", "top", _of_mixture(lambda mlp: mlp.router.top), 10),
    Key(
        "norm_topk_prob", "normalized", _of_mixture(lambda mlp: mlp.router.normalized), True, bool
    ),
    Key("linear_num_value_heads", "linear_heads", _of_recurrent("output", -3), 32),
    Key("linear_num_key_heads", "linear_kv_heads", _of_recurrent("key", -2), 16),
    Key("linear_key_head_dim", "linear_key_dim", _of_recurrent("key", -1), 128),
    Key("linear_value_head_dim", "linear_value_dim", _of_recurrent("output", -2), 128),
    Key("linear_conv_kernel_dim", "width", _of_recurrent("key_filter", -1), 4),
    shared.EPSILON,
    shared.tied(False),
    multi_token_prediction.KEY._replace(most=1),
)  # fmt: skip

FAMILIES = (
    Family(
        "qwen3_next", "Qwen3NextForCausalLM", qwen3_next,
        Names(
            shared.OUTSIDE, _LAYER, in_class=mixtures.IN_CLASS,
            not_adapted=mixtures.GATE_UP_DOWN,  # PEFT takes any MLP's for experts
            heads=multi_token_prediction.tensors(
                "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
            ),
            head="mtp.", layer_in_head="layers.0.",
        ),
        _KEYS,
        Rope(fraction=0.25, partial=True), fixed=shared.SILU | {"attention_bias": False},
        only={"use_sliding_window": (False, None)}, ignored=mixtures.IGNORED,
        reads=_read, writes=_written,
    ),
)  # fmt: skip
