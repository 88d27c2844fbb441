"""LFM2 (Amini et al. 2025, arXiv:2511.23404): gated short convolutions and some attention."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.hugging_face.parts import FULL
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.hybrid.alternating import mixers
from lmlib.models.families.transformer import check_sizes, transformer
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.recurrent.short_convolution import ShortConvolution

CONVOLUTION = "conv"


@variant(without="window rotary_fraction zero_outputs")
def lfm2(
    *,
    layers: int,
    rope_theta: float = 1_000_000.0,
    norm_epsilon: float = 1e-5,
    tied: bool = True,
    attention_layers: Sequence[int] = (),
    width: int = 3,
    convolution_bias: bool = False,
    **others: Any,
) -> Decoder:
    """LFM2 (§2): a `ShortConvolution` with as many channels as `embed`, or attention.

    Other differences from Llama: norms of each head's queries and keys; a tied table.

    Args:
      attention_layers: indices of the layers with attention, from 0.
      width, convolution_bias: number of tokens of the convolutions; True if these layers have
        biases.
    """
    check_sizes(layers=layers, width=width)
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon)
    attention = functools.partial(Attention, norm=norm)

    def convolution(embed: int, **others: Any) -> ShortConvolution:
        return ShortConvolution(embed, embed, width, convolution_bias, **others)

    return transformer(
        layers=layers, rope_theta=rope_theta, norm_epsilon=norm_epsilon, tied=tied,
        attention=mixers(layers, attention_layers, attention, convolution), **others,
    )  # fmt: skip


_IN = "input_gate", "output_gate", "input"
_LAYER = (
    Tensor("operator_norm.weight", {"attention_norm.scale": ("embed",)}),
    Tensor("ffn_norm.weight", {"mlp_norm.scale": ("embed",)}),
    *shared.ATTENTION[:3],
    Tensor("self_attn.out_proj.weight", {"attention.output": ("embed", "heads head_dim")}),
    Tensor("self_attn.q_layernorm.weight", {"attention.query_norm.scale": ("head_dim",)}),
    Tensor("self_attn.k_layernorm.weight", {"attention.key_norm.scale": ("head_dim",)}),
    Tensor("conv.in_proj.weight", {f"attention.{name}": ("channels", "embed") for name in _IN}),
    Tensor("conv.in_proj.bias", {f"attention.{name}_bias": ("channels",) for name in _IN}),
    Tensor("conv.conv.weight", {"attention.filter": ("channels", "", "width")}),
    Tensor("conv.conv.bias", {"attention.filter_bias": ("channels",)}),
    Tensor("conv.out_proj.weight", {"attention.output": ("embed", "channels")}),
    Tensor("conv.out_proj.bias", {"attention.output_bias": ("embed",)}),
    Tensor("feed_forward.w1.weight", {"mlp.gate": ("mlp", "embed")}),
    Tensor("feed_forward.w3.weight", {"mlp.up": ("mlp", "embed")}),
    Tensor("feed_forward.w2.weight", {"mlp.down": ("embed", "mlp")}),
)
_NORM = Tensor("model.embedding_norm.weight", {"norm.scale": ("embed",)})


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    # Keys of published files that repeat others, which transformers does not read.
    for key, argument in _REPEATED.items():
        settings.only(key, arguments[argument])
    return {"mlp": _mlp(settings, arguments), "attention_layers": _attention(settings, arguments)}


_REPEATED = {
    "block_dim": "embed", "conv_dim": "embed", "conv_dim_out": "embed", "num_heads": "heads",
    "block_norm_eps": "norm_epsilon", "theta": "rope_theta",
}  # fmt: skip


def _mlp(settings: Settings, arguments: dict[str, Any]) -> int:
    """Returns the size of MLPs, by default two thirds of the stated one, and rounded up."""
    size, multiple = arguments["mlp"], settings.take("block_multiple_of", 256)
    factor = settings.take("block_ffn_dim_multiplier", 1.0, float)
    if settings.take("block_auto_adjust_ff_dim", True, bool):
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    return int(size)


def _attention(settings: Settings, arguments: dict[str, Any]) -> tuple[int, ...]:
    layers = range(arguments["layers"])
    kinds, indices = (settings.take(key, None, list) for key in ("layer_types", "full_attn_idxs"))
    if kinds is None:
        return tuple(layers if indices is None else (i for i in layers if i in indices))
    if len(kinds) != len(layers) or any(kind not in (FULL, CONVOLUTION) for kind in kinds):
        raise settings.refused(
            "layer_types", f"only {FULL!r} or {CONVOLUTION!r} for each of {len(layers)} layers"
        )
    return tuple(i for i in layers if kinds[i] == FULL)


def _written(model: Decoder) -> dict[str, Any]:
    kinds = {Attention: FULL, ShortConvolution: CONVOLUTION}
    mixers = [type(layer.attention) for layer in parts.layers(model)]
    return {"layer_types": [kinds.get(kind) for kind in mixers], "block_auto_adjust_ff_dim": False}


def _of_convolution(value: Callable[[ShortConvolution], Any]) -> Callable[[Decoder], Any]:
    """Returns a function that reads a value of the first convolution, or `...` without one."""

    def read(model: Decoder) -> Any:
        mixers = (layer.attention for layer in parts.layers(model))
        return next((value(each) for each in mixers if isinstance(each, ShortConvolution)), ...)

    return read


_OTHERS: dict[str, dict[str, Any]] = {
    "intermediate_size": {"default": 12_288, "also": ("block_ff_dim",)},
    "tie_word_embeddings": {"also": ("tie_embedding",)},
}
_KEYS = shared.llama_keys(
    shared.HEAD_DIM, tied_by_default=True, kv_heads=8, norm=shared.epsilon("norm_eps", 1e-5)
)
FAMILIES = (
    Family(
        "lfm2", "Lfm2ForCausalLM", lfm2,
        Names((shared.OUTSIDE[0], _NORM, shared.OUTSIDE[2]), _LAYER),
        (
            *(key._replace(**_OTHERS.get(key.name, {})) for key in _KEYS),
            Key("conv_L_cache", "width", _of_convolution(lambda one: one.width), 3),
            Key(
                "conv_bias", "convolution_bias",
                _of_convolution(lambda one: one.output_bias is not None), False, bool,
            ),
        ),
        Rope(1_000_000.0),
        only={"block_use_swiglu": (True,), "use_pos_enc": (True,)},
        ignored=(
            "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
            "conv_use_xavier_init",
        ),
        written=shared.NO_PADDING,  # the class's default is 0, a row that it never trains
        reads=_read, writes=_written,
    ),
)  # fmt: skip
