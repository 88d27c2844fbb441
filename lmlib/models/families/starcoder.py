"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import shared
from lmlib.models.families.hugging_face.family import Family, Names, Tensor
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.layer_norm import LayerNorm
from lmlib.models.parts.ungated_mlp import MLP, gelu_tanh


@variant(without="head_dim rope_scaling rotary_fraction zero_outputs")
def starcoder2(
    *,
    embed: int,
    mlp: int | None = None,
    tied: bool = True,
    window: int | None = 4_096,
    **others: Any,
) -> Decoder:
    """StarCoder 2.

    Differences from Llama: LayerNorm, biases everywhere, a window, and an MLP of two matrices with
    gelu. `mlp` is 4 · embed by default.
    """
    return transformer(
        embed=embed, mlp=4 * embed if mlp is None else mlp, tied=tied, window=window,
        attention=functools.partial(Attention, bias=True, output_bias=True),
        feed_forward=functools.partial(MLP, activation=gelu_tanh), norm=LayerNorm,
        embedding_deviation=0.02, **others,
    )  # fmt: skip


_LAYER = (
    *shared.ATTENTION,
    *shared.NORMS_BEFORE,
    *shared.BIASES,
    shared.OUTPUT_BIAS,
    *shared.NORM_BIASES,
    Tensor("mlp.c_fc.weight", {"mlp.up": ("mlp", "embed")}),
    Tensor("mlp.c_fc.bias", {"mlp.up_bias": ("mlp",)}),
    Tensor("mlp.c_proj.weight", {"mlp.down": ("embed", "mlp")}),
    Tensor("mlp.c_proj.bias", {"mlp.down_bias": ("embed",)}),
)
_OUTSIDE = (*shared.OUTSIDE, Tensor("model.norm.bias", {"norm.bias": ("embed",)}))


def _read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    settings.only("layer_norm_epsilon", arguments["norm_epsilon"], None)
    return {}


FAMILIES = (
    Family(
        "starcoder2", "Starcoder2ForCausalLM", starcoder2, Names(_OUTSIDE, _LAYER),
        shared.llama_keys(
            shared.WINDOW, tied_by_default=True, kv_heads=2,
            norm=shared.epsilon("norm_epsilon", 1e-5, LayerNorm), mlp=MLP,
        ),
        Rope(scalings=()), {"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
        # The 7B repeats settings under StarCoder 1's names, which `transformers` does not read.
        only={
            "norm_type": ("layer_norm", None),
            "mlp_type": ("default", None),
            "activation_function": ("gelu", "gelu_pytorch_tanh", None),
            "scale_attn_weights": (True, None),
        },
        ignored=("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), reads=_read,
    ),
)  # fmt: skip
