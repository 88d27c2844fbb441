"""Bamba (IBM, Princeton, CMU and UIUC 2024, "Bamba: Inference-Efficient Hybrid Mamba2 Model")."""

import functools
from collections.abc import Sequence
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import shared
from lmlib.models.families.hugging_face.family import Family, Names, Tensor
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.hybrid import mamba
from lmlib.models.families.hybrid.alternating import mixers
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.recurrent.mamba2 import Mamba2


@variant(without="window zero_outputs")
def bamba(
    *,
    embed: int,
    layers: int,
    norm_epsilon: float = 1e-5,
    rotary_fraction: float = 0.5,
    attention_layers: Sequence[int] = (),
    mamba_heads: int = 128,
    mamba_head_dim: int = 64,
    mamba_groups: int = 1,
    mamba_state: int = 128,
    width: int = 4,
    filter_bias: bool = True,
    projection_bias: bool = False,
    time_limits: tuple[float, float] | None = None,
    **others: Any,
) -> Decoder:
    """Bamba: Llama with a Mamba-2 layer in place of attention, except in a few layers.

    Args:
      attention_layers: indices of the layers with attention.
      mamba_heads, mamba_head_dim, mamba_groups, mamba_state, width, filter_bias, projection_bias,
      time_limits: `heads`, `value_dim`, `kv_heads`, `key_dim`, `width`, `filter_bias`, `bias` and
        `time_limits` of `lmlib.models.recurrent.mamba2.Mamba2`.
    """
    recurrent = functools.partial(
        Mamba2, heads=mamba_heads, value_dim=mamba_head_dim, kv_heads=mamba_groups,
        key_dim=mamba_state, width=width, filter_bias=filter_bias, bias=projection_bias,
        time_limits=time_limits, epsilon=norm_epsilon,
    )  # fmt: skip
    return transformer(
        embed=embed, layers=layers, norm_epsilon=norm_epsilon, rotary_fraction=rotary_fraction,
        attention=mixers(layers, attention_layers, Attention, recurrent), **others,
    )  # fmt: skip


_OUTSIDE = (
    Tensor("model.embed_tokens.weight", {"embedding": ("vocab", "embed")}),
    Tensor("model.final_layernorm.weight", {"norm.scale": ("embed",)}),
    Tensor("lm_head.weight", {"unembedding": ("vocab", "embed")}),
)
_LAYER = (
    *shared.ATTENTION,
    *mamba.TENSORS,
    Tensor("input_layernorm.weight", {"attention_norm.scale": ("embed",)}),
    Tensor("pre_ff_layernorm.weight", {"mlp_norm.scale": ("embed",)}),
    Tensor("feed_forward.gate_proj.weight", {"mlp.gate": ("mlp", "embed")}),
    Tensor("feed_forward.up_proj.weight", {"mlp.up": ("mlp", "embed")}),
    Tensor("feed_forward.down_proj.weight", {"mlp.down": ("embed", "mlp")}),
)


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    stated = settings.take("attn_layer_indices", None, list) or []
    indices = tuple(each for each in range(arguments["layers"]) if each in stated)
    head_dim = arguments["head_dim"] or arguments["embed"] // arguments["heads"]
    # Published files have this key, which no reader uses.
    settings.only("attn_rotary_emb", int(head_dim * arguments["rotary_fraction"]))
    return {"attention_layers": indices, **mamba.read(settings, arguments)}


def _written(model: Decoder) -> dict[str, Any]:
    return {"attn_layer_indices": mamba.attention_layers(model), **mamba.written(model)}


FAMILIES = (
    Family(
        "bamba", "BambaForCausalLM", bamba, Names(_OUTSIDE, _LAYER),
        shared.llama_keys(
            shared.HEAD_DIM, *mamba.KEYS, kv_heads=8, norm=shared.epsilon("rms_norm_eps", 1e-5)
        ),
        Rope(partial=True, fraction=0.5), fixed=shared.NO_BIASES,
        ignored=(*mamba.IGNORED, "mamba_dt_rank", "num_logits_to_keep", "z_loss_coefficient"),
        # The class's default, 0, would keep the embedding of token 0 from being trained.
        written=shared.NO_PADDING, reads=_read, writes=_written,
    ),
)  # fmt: skip
