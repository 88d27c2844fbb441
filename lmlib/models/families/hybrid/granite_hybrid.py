"""Granite 4 (IBM 2025, "Granite 4.0"): Granite with Mamba-2 layers, and experts in some sizes."""

import functools
from collections.abc import Sequence
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.router import Router
from lmlib.models.families import granite
from lmlib.models.families.hugging_face import mixtures, parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.hybrid import mamba
from lmlib.models.families.hybrid.alternating import mixers
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.recurrent.mamba2 import Mamba2


@variant(without="window rotary_fraction zero_outputs")
def granite_hybrid(
    *,
    embed: int,
    layers: int,
    heads: int,
    head_dim: int | None,
    norm_epsilon: float = 1e-5,
    tied: bool = True,
    rotary: bool = False,
    expert_mlp: int | None = None,
    experts: int = 0,
    top: int = 2,
    attention_layers: Sequence[int] = (),
    mamba_heads: int = 128,
    mamba_head_dim: int = 64,
    mamba_groups: int = 1,
    mamba_state: int = 128,
    width: int = 4,
    filter_bias: bool = True,
    projection_bias: bool = False,
    time_limits: tuple[float, float] | None = None,
    embedding_scale: float = 12.0,
    residual_multiplier: float = 0.22,
    attention_scale: float | None = None,
    logits_scale: float = 1 / 8,
    **others: Any,
) -> Decoder:
    """Granite 4; takes the arguments of `granite` and the following ones.

    Args:
      rotary: True if attention has rotary positions.
      mlp, experts, expert_mlp, top: sizes of the MLP that all tokens use, and number and size of
        further experts; each token uses `top` of them. There may be no experts.
      attention_layers, mamba_heads, mamba_head_dim, mamba_groups, mamba_state, width, filter_bias,
      projection_bias, time_limits: as in `lmlib.models.families.hybrid.bamba.bamba`.
    """
    scales = embedding_scale, residual_multiplier, attention_scale, logits_scale
    scaled, scale = granite.scaling(embed, heads, head_dim, tied, *scales)
    attention = functools.partial(Attention, scale=scale)
    recurrent = functools.partial(
        Mamba2, heads=mamba_heads, value_dim=mamba_head_dim, kv_heads=mamba_groups,
        key_dim=mamba_state, width=width, filter_bias=filter_bias, bias=projection_bias,
        time_limits=time_limits, epsilon=norm_epsilon,
    )  # fmt: skip

    def mixture(embed: int, mlp: int, **others: Any) -> Mixture:
        router = functools.partial(Router, normalized=True)
        size = expert_mlp or mlp
        return Mixture(
            embed, size, experts=experts, top=top, shared_mlp=mlp, router=router, **others
        )

    return transformer(
        embed=embed, layers=layers, heads=heads, head_dim=head_dim, norm_epsilon=norm_epsilon,
        tied=tied, attention=mixers(layers, attention_layers, attention, recurrent),
        feed_forward=mixture if experts else GatedMLP, rotary_layers=rotary, **scaled, **others,
    )  # fmt: skip


def _shared_mlp(path: str) -> tuple[Tensor, Tensor]:
    return (
        Tensor(
            "shared_mlp.input_linear.weight",
            {f"{path}.{name}": ("mlp", "embed") for name in ("gate", "up")},
        ),
        Tensor("shared_mlp.output_linear.weight", {f"{path}.down": ("embed", "mlp")}),
    )


def _experts(first: str, second: str, router: str) -> tuple[Tensor, ...]:
    gates = {f"mlp.experts.{name}": ("experts", "mlp", "embed") for name in ("gate", "up")}
    return (
        Tensor(f"block_sparse_moe.{first}", gates, along=1),
        Tensor(f"block_sparse_moe.{second}", {"mlp.experts.down": ("experts", "embed", "mlp")}),
        Tensor(f"block_sparse_moe.{router}", {"mlp.router.logits": ("choice", "embed")}),
    )


_LAYER = (
    *shared.ATTENTION,
    *shared.NORMS_BEFORE,
    *mamba.TENSORS,
    *_shared_mlp("mlp"),
    *_shared_mlp("mlp.shared"),
    *_experts("input_linear.weight", "output_linear.weight", "router.layer.weight"),
)
_IN_CLASS = _experts("experts.gate_up_proj", "experts.down_proj", "router.weight")
_ROPE = Rope()
_OF_POSITIONS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_KINDS = {"mamba": False, "linear_attention": False, "attention": True, parts.FULL: True}


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    layers = arguments["layers"]
    kinds = settings.take("layer_types", ["mamba"] * layers, list)
    if len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise settings.refused("layer_types", f"only {', '.join(_KINDS)} for each of {layers}")
    found = {"attention_layers": tuple(i for i, kind in enumerate(kinds) if _KINDS[kind])}
    rotary = settings.only("position_embedding_type", None, "nope", "rope") == "rope"
    if rotary:
        found |= _ROPE.arguments(settings)
    else:
        settings.ignore(*_OF_POSITIONS)
    scales = granite.read_scales(settings, arguments)
    return {**found, "rotary": rotary, **scales, **mamba.read(settings, arguments)}


def _written(model: Decoder) -> dict[str, Any]:
    attention = mamba.attention_layers(model)
    kinds = [i in attention for i in range(len(parts.layers(model)))]
    rotary = parts.attention(model).rotary
    found = {} if rotary is None else _ROPE.settings(rotary, parts.head_dim(model))
    return {
        **found,
        "layer_types": [parts.FULL if each else "linear_attention" for each in kinds],
        "position_embedding_type": None if rotary is None else "rope",
        **granite.written_scales(model),
        **mamba.written(model),
    }


def _mlp(model: Decoder) -> GatedMLP:
    mlp = parts.layers(model)[0].mlp
    return parts.a(GatedMLP, mlp.shared if isinstance(mlp, Mixture) else mlp)


def _of_experts(read: Any, otherwise: Any) -> Any:
    """Returns a function that reads a setting of the first mixture, or `otherwise` without one."""

    def of(model: Decoder) -> Any:
        mlp = parts.layers(model)[0].mlp
        return read(mlp) if isinstance(mlp, Mixture) else otherwise

    return of


_KEYS = (
    *(key for key in shared.llama_keys(shared.HEAD_DIM, *granite.SCALES) if key.argument != "mlp"),
    Key("shared_intermediate_size", "mlp", lambda model: _mlp(model).down.shape[-2], 1_024),
    Key(
        "intermediate_size", "expert_mlp",
        _of_experts(lambda mlp: mlp.experts.down.shape[-2], 11_008), 11_008,
    ),
    Key(
        "num_local_experts", "experts", _of_experts(lambda mlp: mlp.router.experts, 0), 8,
        zero=True,
    ),
    # Published files without experts say 0.
    Key("num_experts_per_tok", "top", _of_experts(lambda mlp: mlp.router.top, 2), 2, zero=True),
    *mamba.KEYS,
)  # fmt: skip
FAMILIES = (
    Family(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", granite_hybrid,
        Names(shared.OUTSIDE, _LAYER, in_class=_IN_CLASS), _KEYS, rope=None,
        fixed={**shared.SILU, "attention_bias": False},
        only={"normalization_function": ("rmsnorm",)},  # of published files, read by nobody
        ignored=(*mamba.IGNORED, *mixtures.IGNORED, "init_method"), reads=_read, writes=_written,
    ),
)  # fmt: skip
