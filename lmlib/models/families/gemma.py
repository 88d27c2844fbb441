"""Gemma 2 and 3, text models (Gemma Team 2024, arXiv:2408.00118; 2025, arXiv:2503.19786)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.hugging_face.parts import FULL, SLIDING
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.families.windows import each_nth
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary, Scaling
from lmlib.models.parts.rope_scaling import Linear, Llama3, Yarn
from lmlib.models.parts.ungated_mlp import gelu_tanh

_NORMS = ("attention_norm", "attention_after_norm", "mlp_norm", "mlp_after_norm")


@variant(without="rope_scaling rotary_fraction zero_outputs")
def gemma2(
    *,
    head_dim: int = 256,
    query_scale: float = 256.0,
    window: int = 4_096,
    period: int = 2,
    norm_epsilon: float = 1e-6,
    attention_cap: float | None = 50.0,
    tied: bool = True,
    logit_cap: float | None = 30.0,
    **others: Any,
) -> Decoder:
    """Gemma 2 (§2).

    Differences from Llama: norms before and after attention and MLP, with 1 added to their scale;
    embedded tokens multiplied by √embed; gelu instead of silu; capped scores and logits; local
    layers (with a window) alternate with global ones.

    Args:
      query_scale: scores are multiplied by query_scale^-1/2.
      window, period: positions that a local layer attends to; every `period`-th layer is global.
      attention_cap, logit_cap: c; scores or logits z become c · tanh(z / c). `None`: no cap.
    """
    return _gemma(
        head_dim=head_dim, norm_epsilon=norm_epsilon, tied=tied, window=window, period=period,
        attention=functools.partial(Attention, scale=query_scale**-0.5, soft_cap=attention_cap),
        logit_cap=logit_cap, **others,
    )  # fmt: skip


@variant(without="rotary_fraction zero_outputs")
def gemma3(
    *,
    layers: int,
    head_dim: int = 256,
    query_scale: float = 256.0,
    window: int = 512,
    period: int = 6,
    rope_theta: float = 1_000_000.0,
    rope_scaling: Scaling | None = None,
    local_rope_theta: float = 10_000.0,
    norm_epsilon: float = 1e-6,
    tied: bool = True,
    **others: Any,
) -> Decoder:
    """Gemma 3, text (§2.1).

    Differences from Gemma 2: no caps; norms of each head's queries and keys. `rope_theta` and
    `rope_scaling` are for global layers, `local_rope_theta` for local ones.
    """
    whole, local = Rotary(head_dim, rope_theta, rope_scaling), Rotary(head_dim, local_rope_theta)
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon, 1.0)
    return _gemma(
        layers=layers, head_dim=head_dim, norm_epsilon=norm_epsilon, tied=tied, window=window,
        period=period, attention=functools.partial(Attention, scale=query_scale**-0.5, norm=norm),
        rotary_layers=[whole if each else local for each in each_nth(period, layers)], **others,
    )  # fmt: skip


def _gemma(*, embed: int, layers: int, window: int, period: int, **others: Any) -> Decoder:
    """Makes a Gemma, with initial values that suit its norms and its scaled embedding."""
    return transformer(
        embed=embed, layers=layers, norm=functools.partial(RMSNorm, offset=1.0), norms=_NORMS,
        window=[None if each else window for each in each_nth(period, layers)],
        feed_forward=functools.partial(GatedMLP, activation=gelu_tanh), writes=1.0,
        embedding_deviation=embed**-0.5, embedding_scale=embed**0.5, **others,
    )  # fmt: skip


_LAYER = (
    *shared.ATTENTION,
    *shared.MLP,
    Tensor("input_layernorm.weight", {"attention_norm.scale": ("embed",)}),
    Tensor("post_attention_layernorm.weight", {"attention_after_norm.scale": ("embed",)}),
    Tensor("pre_feedforward_layernorm.weight", {"mlp_norm.scale": ("embed",)}),
    Tensor("post_feedforward_layernorm.weight", {"mlp_after_norm.scale": ("embed",)}),
)
_PERIODS = ("sliding_window_pattern", "_sliding_window_pattern")
_WHOLE = Rope(1_000_000.0, (Linear, Llama3, Yarn))


def _read(
    settings: Settings, arguments: dict[str, Any], stated: str | None, default: int
) -> dict[str, Any]:
    """Reads the period of global layers, under the key `stated`, if layer_types are absent."""
    settings.only("sliding_window_size", arguments["window"], None)  # a duplicate key of Gemma 2 9B
    layers, kinds = arguments["layers"], settings.take("layer_types", None, list)
    if kinds is None:
        period = default if stated is None else settings.take(stated, default)
        for key in _PERIODS:  # transformers reads no other period
            settings.only(key, period, None)
        return {"period": period}
    settings.ignore(*_PERIODS)
    period = kinds.index(FULL) + 1 if FULL in kinds else layers + 1
    if kinds != [FULL if each else SLIDING for each in each_nth(period, layers)]:
        raise settings.refused(
            "layer_types",
            f"only {layers} layers of which each n-th is {FULL!r} and all others are {SLIDING!r}",
        )
    return {"period": period}


def _read_ropes(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    where, given = settings.where, settings.take("rope_parameters", {}, dict)
    ropes = Settings(given, f"{where}: rope_parameters", ())
    whole, local = (ropes.take(kind, {}, dict) for kind in (FULL, SLIDING))
    ropes.done()
    # Merged as in transformers: rope_scaling's keys take precedence.
    whole = {"rope_type": "default"} | whole | settings.take("rope_scaling", {}, dict)
    longest = settings.take("max_position_embeddings", None)

    def read(rope: Rope, kind: str, key: str, parameters: dict[str, Any]) -> dict[str, Any]:
        theta = settings.take(key, rope.theta, float, null=True)
        content = {"rope_parameters": parameters, "max_position_embeddings": longest}
        return rope.arguments(Settings(content | {"rope_theta": theta}, f"{where}: {kind}"))

    local_rope = read(Rope(scalings=()), SLIDING, "rope_local_base_freq", local)
    return {
        **_read(settings, arguments, "sliding_window_pattern", 6),
        **read(_WHOLE, FULL, "rope_theta", whole),
        "local_rope_theta": local_rope["rope_theta"],
    }


def _written(model: Decoder) -> dict[str, Any]:
    return {"sliding_window": parts.window(model) or 4_096, "layer_types": parts.types_of(model)}


def _written_ropes(model: Decoder) -> dict[str, Any]:
    ropes = {
        FULL if mixer.window is None else SLIDING: _WHOLE.settings(
            mixer.rotary, parts.head_dim(model)
        )
        for mixer in parts.attentions(model)
        if mixer.rotary is not None
    }
    # Old files store global layers' rope like other families, and local layers' base apart.
    local = {"rope_local_base_freq": ropes[SLIDING]["rope_theta"]} if SLIDING in ropes else {}
    new = {kind: rope["rope_parameters"] for kind, rope in ropes.items()}
    usual = ropes.get(FULL) or ropes.get(SLIDING, {})
    return _written(model) | usual | local | {"rope_parameters": new}


_KEYS = shared.llama_keys(
    shared.HEAD_DIM._replace(default=256),
    Key(
        "query_pre_attn_scalar", "query_scale",
        lambda model: round((parts.attention(model).scale or parts.head_dim(model)**-0.5)**-2),
        256.0, float,
    ),
    Key("sliding_window", "window", parts.window, 4_096),
    tied_by_default=True, kv_heads=4,
)  # fmt: skip
_ONLY = {
    "hidden_act": ("gelu_pytorch_tanh", None),  # transformers does not read it
    "use_bidirectional_attention": (False, None),
}
_FIXED = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_CAPS = (
    Key(
        "attn_logit_softcapping", "attention_cap", lambda model: parts.attention(model).soft_cap,
        50.0, float, null=True,
    ),
    Key(
        "final_logit_softcapping", "logit_cap", lambda model: model.logit_cap,
        30.0, float, null=True,
    ),
)  # fmt: skip
FAMILIES = (
    Family(
        "gemma2", "Gemma2ForCausalLM", gemma2, Names(shared.OUTSIDE, _LAYER),
        (*_KEYS, *_CAPS), Rope(scalings=()), _FIXED, _ONLY,
        reads=functools.partial(_read, stated=None, default=2), writes=_written,
        written=shared.NO_PADDING,
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", gemma3,
        Names(shared.OUTSIDE, (*_LAYER, *shared.HEAD_NORMS)), _KEYS, None, _FIXED,
        _ONLY | {"attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
        reads=_read_ropes, writes=_written_ropes,
        written=shared.NO_PADDING,  # the class's default is 0, a row that it never trains
    ),
)  # fmt: skip
