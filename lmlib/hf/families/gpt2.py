"""GPT-2."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.family import Family
from lmlib.hf.names import Names, Tensor
from lmlib.hf.parts import a, attentions, layers
from lmlib.hf.settings import LARGEST_EPSILON, MOST_LAYERS, Settings
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.gpt2 import gpt2
from lmlib.models.parts.embedding import Positions
from lmlib.models.parts.mlp import MLP
from lmlib.models.parts.norms import LayerNorm

_OUTSIDE = (
    Tensor("transformer.wte.weight", {"embedding": ("vocab", "embed")}),
    Tensor("transformer.wpe.weight", {"positions.table": ("position", "embed")}),
    Tensor("transformer.ln_f.weight", {"norm.scale": ("embed",)}),
    Tensor("transformer.ln_f.bias", {"norm.bias": ("embed",)}),
    Tensor("lm_head.weight", {"unembedding": ("vocab", "embed")}),
)
# Its matrices have inputs as rows.
_LAYER = (
    Tensor("ln_1.weight", {"attention_norm.scale": ("embed",)}),
    Tensor("ln_1.bias", {"attention_norm.bias": ("embed",)}),
    Tensor(
        "attn.c_attn.weight",
        {
            "attention.query": ("embed", "heads head_dim"),
            "attention.key": ("embed", "kv_heads head_dim"),
            "attention.value": ("embed", "kv_heads head_dim"),
        },
        along=1,
    ),
    Tensor(
        "attn.c_attn.bias",
        {
            "attention.query_bias": ("heads head_dim",),
            "attention.key_bias": ("kv_heads head_dim",),
            "attention.value_bias": ("kv_heads head_dim",),
        },
    ),
    Tensor("attn.c_proj.weight", {"attention.output": ("heads head_dim", "embed")}),
    Tensor("attn.c_proj.bias", {"attention.output_bias": ("embed",)}),
    Tensor("ln_2.weight", {"mlp_norm.scale": ("embed",)}),
    Tensor("ln_2.bias", {"mlp_norm.bias": ("embed",)}),
    Tensor("mlp.c_fc.weight", {"mlp.up": ("embed", "mlp")}),
    Tensor("mlp.c_fc.bias", {"mlp.up_bias": ("mlp",)}),
    Tensor("mlp.c_proj.weight", {"mlp.down": ("mlp", "embed")}),
    Tensor("mlp.c_proj.bias", {"mlp.down_bias": ("embed",)}),
)


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    # Summaries and special tokens are of other heads, n_ctx is an old n_positions.
    settings.ignore("reorder_and_upcast_attn", "n_ctx", "n_special", "predict_special_tokens")
    settings.ignore(
        "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout",
    )  # fmt: skip
    embed = settings.take("n_embd", 768)
    return {
        "vocab": settings.take("vocab_size", 50_257),
        "embed": embed,
        "layers": settings.take("n_layer", 12, most=MOST_LAYERS),
        "heads": settings.take("n_head", 12),
        "mlp": settings.take("n_inner", None) or 4 * embed,
        "positions": settings.take("n_positions", 1_024),
        "norm_epsilon": settings.take("layer_norm_epsilon", 1e-5, float, most=LARGEST_EPSILON),
        "tied": settings.take("tie_word_embeddings", True, bool),
    }


def _settings(model: Decoder) -> dict[str, Any]:
    blocks = layers(model, Block)
    return {
        "vocab_size": model.vocab,
        "n_embd": model.embedding.shape[-1],
        "n_layer": len(blocks),
        "n_head": attentions(model)[0].query.shape[-2],
        "n_inner": a(MLP, blocks[0].mlp).down.shape[-2],
        "n_positions": a(Positions, model.positions).table.shape[0],
        "layer_norm_epsilon": a(LayerNorm, model.norm).epsilon,
        "tie_word_embeddings": model.unembedding is None,
        "activation_function": "gelu_new",
    }


FAMILIES: Sequence[Family] = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        gpt2,
        Names(_OUTSIDE, _LAYER, prefix="transformer.h.{layer}.", base="transformer."),
        _arguments,
        _settings,
    ),
)
