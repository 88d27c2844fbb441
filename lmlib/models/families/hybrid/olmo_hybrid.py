"""OLMo Hybrid (Team OLMo 2026, "Olmo Hybrid: From Theory to Practice and Back")."""

import functools
from collections.abc import Sequence
from typing import Any

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.hugging_face.parts import FULL
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.hybrid.alternating import every_nth, mixers
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.part import Norm, Part
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.recurrent.gated_deltanet import GatedDeltaNet


@variant(without="head_dim window rotary_fraction zero_outputs")
def olmo_hybrid(
    *,
    embed: int,
    layers: int,
    heads: int,
    rope_theta: float | None = None,
    norm_epsilon: float = 1e-6,
    attention_layers: Sequence[int] | None = None,
    linear_heads: int | None = None,
    linear_kv_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    width: int = 4,
    negative: bool = True,
    **others: Any,
) -> Decoder:
    """OLMo Hybrid: `GatedDeltaNet` layers, and attention as in OLMo 2 in every fourth layer.

    Args:
      rope_theta: `None`: attention without positions.
      attention_layers: indices of the layers with attention, from 0; `None`: each fourth, or the
        last one if there are fewer.
      linear_heads, linear_kv_heads: heads of values and of keys in the other layers; `None`: as
        many as `heads`.
      key_dim, value_dim: sizes of their heads; `None`: ¾ · embed / linear_kv_heads, and twice this.
      width, negative: as in `GatedDeltaNet`.
    """
    attends = usual(layers) if attention_layers is None else attention_layers
    if len({*attends}) in (0, layers):
        raise ValueError(
            f"attention_layers must have some of {layers} layers, and not all, got {attends}"
        )
    linear_heads = heads if linear_heads is None else linear_heads
    linear_kv_heads = heads if linear_kv_heads is None else linear_kv_heads
    key_dim = 3 * embed // (4 * linear_kv_heads) if key_dim is None else key_dim
    recurrent = functools.partial(
        GatedDeltaNet, heads=linear_heads, kv_heads=linear_kv_heads, key_dim=key_dim,
        value_dim=2 * key_dim if value_dim is None else value_dim, width=width, negative=negative,
    )  # fmt: skip
    attention = functools.partial(
        Attention,
        norm=functools.partial(RMSNorm, "heads head_dim", norm_epsilon),
        key_norm=functools.partial(RMSNorm, "kv_heads head_dim", norm_epsilon),
    )
    return transformer(
        embed=embed, layers=layers, heads=heads, norm_epsilon=norm_epsilon,
        rope_theta=rope_theta or 1.0, rotary_layers=rope_theta is not None,
        attention=mixers(layers, attends, attention, recurrent), block=_block, **others,
    )  # fmt: skip


def usual(layers: int) -> tuple[int, ...]:
    """The usual `attention_layers`."""
    return every_nth(4, layers) or (layers - 1,)


def _block(attention: Part, mlp: Part, attention_norm: Norm, mlp_norm: Norm) -> Block:
    """Norms come after the parts of a layer with attention, and before them in other layers."""
    if isinstance(attention, Attention):
        return Block(attention, mlp, attention_after_norm=attention_norm, mlp_after_norm=mlp_norm)
    return Block(attention, mlp, attention_norm, mlp_norm)


_KEYS, _VALUES = "kv_heads key_dim", "heads value_dim"
_FILTERS = {
    f"attention.{name}_filter": (axes, "", "width")
    for name, axes in {"query": _KEYS, "key": _KEYS, "value": _VALUES}.items()
}
_LAYER = (
    *shared.ATTENTION,
    *shared.QUERY_KEY_NORMS,
    *shared.MLP,
    *shared.NORMS_BEFORE,
    Tensor("post_attention_layernorm.weight", {"attention_after_norm.scale": ("embed",)}),
    Tensor("post_feedforward_layernorm.weight", {"mlp_after_norm.scale": ("embed",)}),
    Tensor("linear_attn.q_proj.weight", {"attention.query": (_KEYS, "embed")}),
    Tensor("linear_attn.k_proj.weight", {"attention.key": (_KEYS, "embed")}),
    Tensor("linear_attn.v_proj.weight", {"attention.value": (_VALUES, "embed")}),
    Tensor("linear_attn.g_proj.weight", {"attention.gate": (_VALUES, "embed")}),
    Tensor("linear_attn.a_proj.weight", {"attention.time": ("heads", "embed")}),
    Tensor("linear_attn.b_proj.weight", {"attention.rate": ("heads", "embed")}),
    Tensor("linear_attn.o_proj.weight", {"attention.output": ("embed", _VALUES)}),
    *(
        Tensor(f"linear_attn.{path[len('attention.')]}_conv1d.weight", {path: axes})
        for path, axes in _FILTERS.items()
    ),
    Tensor("linear_attn.dt_bias", {"attention.time_bias": ("heads",)}),
    Tensor("linear_attn.A_log", {"attention.log_rate": ("heads",)}),
    Tensor("linear_attn.o_norm.weight", {"attention.norm.scale": ("head_dim",)}),
)
_RENAMED = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
_LINEAR = "linear_attention"
_ROPE = Rope()


def _recurrent(model: Decoder) -> GatedDeltaNet:
    return parts.mixer(model, GatedDeltaNet)


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    layers = arguments["layers"]
    kinds = settings.take("layer_types", None, list)
    if kinds is not None and (len(kinds) != layers or {*kinds} != {FULL, _LINEAR}):
        raise settings.refused(
            "layer_types", f"only {FULL!r} and {_LINEAR!r}, both of them, for {layers} layers"
        )
    attends = usual(layers)
    if kinds is not None:
        attends = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
    found = {"attention_layers": None if attends == usual(layers) else attends}
    # Some readers take null for no positions, and transformers 5.23 for a rope: it is refused.
    rope = settings.take("rope_parameters", {"rope_theta": 10_000.0}, dict)
    if "rope_theta" in rope and rope["rope_theta"] is None:  # then transformers ignores the others
        settings.only("rope_theta", None)
        settings.only("rope_scaling", None)
        settings.ignore("max_position_embeddings")
        return found
    return found | _ROPE.arguments(settings)


def _written(model: Decoder) -> dict[str, Any]:
    attention = parts.attention(model)
    mixers = [layer.attention for layer in parts.layers(model)]
    types = [FULL if isinstance(each, Attention) else _LINEAR for each in mixers]
    rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    if attention.rotary is not None:
        rope = _ROPE.settings(attention.rotary, attention.query.shape[-1])
    return {"layer_types": types, **rope}


FAMILIES = (
    Family(
        "olmo_hybrid", "OlmoHybridForCausalLM", olmo_hybrid,
        Names(
            shared.OUTSIDE, _LAYER, in_class=(Tensor("linear_attn.conv1d.weight", _FILTERS),),
            renamed=_RENAMED,
        ),
        (
            *shared.llama_keys(),
            Key(
                "linear_num_value_heads", "linear_heads",
                lambda model: _recurrent(model).value.shape[-2], None,
            ),
            Key(
                "linear_num_key_heads", "linear_kv_heads",
                lambda model: _recurrent(model).key.shape[-2], None,
            ),
            Key(
                "linear_key_head_dim", "key_dim", lambda model: _recurrent(model).key.shape[-1],
                None,
            ),
            Key(
                "linear_value_head_dim", "value_dim",
                lambda model: _recurrent(model).value.shape[-1], None,
            ),
            Key("linear_conv_kernel_dim", "width", lambda model: _recurrent(model).width, 4),
            Key(
                "linear_allow_neg_eigval", "negative", lambda model: _recurrent(model).negative,
                True, bool,
            ),
        ),
        rope=None,
        fixed=shared.SILU | {"attention_bias": False},
        # These concern initial values only.
        ignored=[f"linear_{name}" for name in (
            "a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"
        )],
        # The class's default pad_token_id is 100,277, which may be outside the vocabulary.
        written=shared.NO_PADDING, reads=_read, writes=_written,
    ),
)  # fmt: skip
