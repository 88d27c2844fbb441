"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", §2.3)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.transformer import check_sizes, transformer
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.embedding import Positions
from lmlib.models.parts.layer_norm import LayerNorm
from lmlib.models.parts.ungated_mlp import MLP, gelu_tanh


@variant(without="kv_heads head_dim rope_theta rope_scaling window rotary_fraction zero_outputs")
def gpt2(
    *, embed: int, mlp: int | None = None, tied: bool = True, positions: int = 1_024, **others: Any
) -> Decoder:
    """GPT-2.

    Differences from Llama: learned positions, LayerNorm, biases everywhere, as many key-value heads
    as query heads, and an MLP of two matrices with gelu. `mlp` is 4 · embed by default; `positions`
    is the longest sequence.
    """
    check_sizes(positions=positions)
    return transformer(
        embed=embed, mlp=4 * embed if mlp is None else mlp, tied=tied, norm=LayerNorm,
        attention=functools.partial(Attention, bias=True, output_bias=True), rotary_layers=False,
        feed_forward=functools.partial(MLP, activation=gelu_tanh),
        positions=functools.partial(Positions, positions, embed),
        embedding_deviation=0.02, **others,
    )  # fmt: skip


_OUTSIDE = (
    Tensor("transformer.wte.weight", {"embedding": ("vocab", "embed")}),
    Tensor("transformer.wpe.weight", {"positions.table": ("position", "embed")}),
    Tensor("transformer.ln_f.weight", {"norm.scale": ("embed",)}),
    Tensor("transformer.ln_f.bias", {"norm.bias": ("embed",)}),
    Tensor("lm_head.weight", {"unembedding": ("vocab", "embed")}),
)
# GPT-2's matrices have inputs as rows.
_LAYER = (
    Tensor("ln_1.weight", {"attention_norm.scale": ("embed",)}),
    Tensor("ln_1.bias", {"attention_norm.bias": ("embed",)}),
    shared.query_key_value("attn.c_attn.weight", before=("embed",), along=1),
    shared.query_key_value("attn.c_attn.bias", suffix="_bias"),
    Tensor("attn.c_proj.weight", {"attention.output": ("heads head_dim", "embed")}),
    Tensor("attn.c_proj.bias", {"attention.output_bias": ("embed",)}),
    Tensor("ln_2.weight", {"mlp_norm.scale": ("embed",)}),
    Tensor("ln_2.bias", {"mlp_norm.bias": ("embed",)}),
    Tensor("mlp.c_fc.weight", {"mlp.up": ("embed", "mlp")}),
    Tensor("mlp.c_fc.bias", {"mlp.up_bias": ("mlp",)}),
    Tensor("mlp.c_proj.weight", {"mlp.down": ("mlp", "embed")}),
    Tensor("mlp.c_proj.bias", {"mlp.down_bias": ("embed",)}),
)
_KEYS = (
    Key("vocab_size", "vocab", lambda model: model.vocab, 50_257),
    Key("n_embd", "embed", lambda model: model.embedding.shape[-1], 768),
    Key("n_layer", "layers", lambda model: len(parts.layers(model)), 12, most=shared.MOST_LAYERS),
    Key("n_head", "heads", lambda model: parts.attention(model).query.shape[-2], 12),
    Key("n_inner", "mlp", lambda model: parts.mlp(model, MLP).down.shape[-2], None),
    Key(
        "n_positions", "positions",
        lambda model: parts.a(Positions, model.positions).table.shape[0], 1_024,
    ),
    shared.epsilon("layer_norm_epsilon", 1e-5, LayerNorm),
    shared.tied(True),
)  # fmt: skip

FAMILIES = (
    Family(
        "gpt2", "GPT2LMHeadModel", gpt2,
        Names(_OUTSIDE, _LAYER, prefix="transformer.h.{layer}.", base="transformer."),
        _KEYS, rope=None,
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        # Summaries and special tokens are for other heads; n_ctx is an old name of n_positions.
        ignored=(
            "reorder_and_upcast_attn", "n_ctx", "n_special", "predict_special_tokens",
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        written={"activation_function": "gelu_new"},
    ),
)  # fmt: skip
