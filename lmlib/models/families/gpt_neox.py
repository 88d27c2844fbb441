"""GPT-NeoX and Pythia.

Sources: Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373.
"""

import functools
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array

from lmlib.models.block import Block, BlockBase
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.forward_context import ForwardContext
from lmlib.models.part import ActivationNames as PartNames
from lmlib.models.part import AuxOutputs, Norm, Part, merge_names
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.layer_norm import LayerNorm
from lmlib.models.parts.mlp import Activation, silu
from lmlib.models.parts.rope_scaling import Dynamic, Linear
from lmlib.models.parts.ungated_mlp import MLP, gelu, gelu_tanh, relu_squared


class ParallelBlock(BlockBase):
    """x + attention(norm(x)) + mlp(norm(x)), each with its own optional norm (§2.1)."""

    rows_may_be_split = True

    attention_norm: Norm | None
    attention: Part
    mlp_norm: Norm | None
    mlp: Part

    def __call__(
        self, x_BSE: Array, context: ForwardContext, cache: Any = None
    ) -> tuple[Array, AuxOutputs, Any]:
        """A layer's call; see `Part`."""
        attended_BSE, cache = self.attended(x_BSE, context, cache)
        h_BSE, aux = self.fed_forward(x_BSE, context)
        # Added to each other first: their sum is smaller than the stream, so it rounds less.
        h_BSE = context.dropped(attended_BSE, "attention") + context.dropped(h_BSE, "mlp")
        return x_BSE + h_BSE, aux, cache

    @property
    def names(self) -> PartNames:
        before = PartNames(("attention_input",)), PartNames(("mlp_input",))
        return merge_names(before[0], self.attention.names, before[1], self.mlp.names)


@variant(without="kv_heads head_dim window zero_outputs")
def gpt_neox(
    *,
    embed: int,
    mlp: int | None = None,
    tied: bool = False,
    rotary_fraction: float = 0.25,
    parallel: bool = True,
    activation: Activation = gelu,
    **others: Any,
) -> Decoder:
    """GPT-NeoX (§2.1).

    Differences from Llama: parallel attention and MLP, LayerNorm, biases everywhere, as many
    key-value heads as query heads, rotary positions for a fraction of each head's coordinates, and
    an MLP of two matrices with gelu. `mlp` is 4 · embed by default. Without `parallel`, the MLP
    reads the sum of the residual stream and attention's output.
    """
    return transformer(
        embed=embed, mlp=4 * embed if mlp is None else mlp, tied=tied,
        rotary_fraction=rotary_fraction,
        attention=functools.partial(Attention, bias=True, output_bias=True),
        feed_forward=functools.partial(MLP, activation=activation), norm=LayerNorm,
        block=ParallelBlock if parallel else Block,
        embedding_deviation=0.02 if tied else 1.0, **others,
    )  # fmt: skip


# Names of activations in a config.json. If a function has several names, the first is written.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": silu,
    "swish": silu,
    "relu2": relu_squared,
}
_OUTSIDE = (
    Tensor("gpt_neox.embed_in.weight", {"embedding": ("vocab", "embed")}),
    Tensor("gpt_neox.final_layer_norm.weight", {"norm.scale": ("embed",)}),
    Tensor("gpt_neox.final_layer_norm.bias", {"norm.bias": ("embed",)}),
    Tensor("embed_out.weight", {"unembedding": ("vocab", "embed")}),
)
_LAYER = (
    *shared.NORMS_BEFORE,
    *shared.NORM_BIASES,
    shared.query_key_value("attention.query_key_value.weight", after=("embed",), each="heads"),
    shared.query_key_value("attention.query_key_value.bias", suffix="_bias", each="heads"),
    Tensor("attention.dense.weight", {"attention.output": ("embed", "heads head_dim")}),
    Tensor("attention.dense.bias", {"attention.output_bias": ("embed",)}),
    Tensor("mlp.dense_h_to_4h.weight", {"mlp.up": ("mlp", "embed")}),
    Tensor("mlp.dense_h_to_4h.bias", {"mlp.up_bias": ("mlp",)}),
    Tensor("mlp.dense_4h_to_h.weight", {"mlp.down": ("embed", "mlp")}),
    Tensor("mlp.dense_4h_to_h.bias", {"mlp.down_bias": ("embed",)}),
)
_NAMES = Names(
    _OUTSIDE, _LAYER, "gpt_neox.layers.{layer}.", "gpt_neox.",
    without_effect=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    modules={"embed_out.weight": "lm_head.weight"},
)  # fmt: skip


_KEYS = shared.llama_keys(
    Key(
        "use_parallel_residual", "parallel",
        lambda model: isinstance(parts.layers(model)[0], ParallelBlock), True, bool,
    ),
    norm=shared.epsilon("layer_norm_eps", 1e-5, LayerNorm), mlp=MLP,
)  # fmt: skip


def family(activations: Mapping[str, Activation] = ACTIVATIONS) -> Family:
    """Returns GPT-NeoX's declaration; `activations` maps values of `hidden_act` to functions."""

    def read(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
        # transformers reads neither of these two.
        settings.only("rope_theta", arguments["rope_theta"], None)
        settings.only("partial_rotary_factor", arguments["rotary_fraction"], None)
        return {"activation": activations[settings.only("hidden_act", *activations) or "gelu"]}

    def written(model: Decoder) -> dict[str, Any]:
        activation = parts.mlp(model, MLP).activation
        for name, function in activations.items():
            if function is activation:
                return {"hidden_act": name}
        raise ValueError(f"the family has no name for the activation {activation!r}")

    return Family(
        "gpt_neox", "GPTNeoXForCausalLM", gpt_neox, _NAMES,
        [key for key in _KEYS if key.argument != "kv_heads"],
        Rope(
            scalings=(Linear, Dynamic), fraction=0.25, partial=True,
            keys=("rotary_emb_base", "rotary_pct"),
        ),
        only={"attention_bias": (True,)}, ignored=("hidden_dropout", "classifier_dropout"),
        reads=read, writes=written,
    )  # fmt: skip


FAMILIES = (family(),)
