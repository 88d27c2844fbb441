"""GPT-NeoX and Pythia, whose folders hold queries, keys and values head by head."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.activations import ACTIVATIONS, Activations, name_of, read_activation
from lmlib.hf.families.llama import NORMS_BEFORE, shared_settings
from lmlib.hf.family import Family
from lmlib.hf.names import Names, Tensor
from lmlib.hf.parts import a, attentions, head_dim, layers
from lmlib.hf.rope_settings import read_rope, rotary_fraction_of
from lmlib.hf.settings import LARGEST_EPSILON, MOST_LAYERS, Settings
from lmlib.models.block import Block, ParallelBlock
from lmlib.models.decoder import Decoder
from lmlib.models.families.gpt_neox import gpt_neox
from lmlib.models.parts.mlp import MLP
from lmlib.models.parts.norms import LayerNorm
from lmlib.models.parts.rope_scaling import Dynamic, Linear

_OUTSIDE = (
    Tensor("gpt_neox.embed_in.weight", {"embedding": ("vocab", "embed")}),
    Tensor("gpt_neox.final_layer_norm.weight", {"norm.scale": ("embed",)}),
    Tensor("gpt_neox.final_layer_norm.bias", {"norm.bias": ("embed",)}),
    Tensor("embed_out.weight", {"unembedding": ("vocab", "embed")}),
)
_LAYER = (
    *NORMS_BEFORE,
    Tensor("input_layernorm.bias", {"attention_norm.bias": ("embed",)}),
    Tensor("post_attention_layernorm.bias", {"mlp_norm.bias": ("embed",)}),
    Tensor(
        "attention.query_key_value.weight",
        {
            "attention.query": ("heads head_dim", "embed"),
            "attention.key": ("kv_heads head_dim", "embed"),
            "attention.value": ("kv_heads head_dim", "embed"),
        },
        each="heads",
    ),
    Tensor(
        "attention.query_key_value.bias",
        {
            "attention.query_bias": ("heads head_dim",),
            "attention.key_bias": ("kv_heads head_dim",),
            "attention.value_bias": ("kv_heads head_dim",),
        },
        each="heads",
    ),
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


def _arguments(settings: Settings, activations: Activations) -> dict[str, Any]:
    settings.only("attention_bias", True)
    settings.ignore("hidden_dropout", "classifier_dropout")
    rope = read_rope(
        settings, scalings=(Linear, Dynamic), fraction=0.25, partial=True,
        keys=("rotary_emb_base", "rotary_pct"),
    )  # fmt: skip
    settings.only("rope_theta", rope.theta, None)  # transformers reads neither of these
    settings.only("partial_rotary_factor", rope.rotary_fraction, None)
    return {
        "vocab": settings.take("vocab_size"),
        "embed": settings.take("hidden_size"),
        "layers": settings.take("num_hidden_layers", most=MOST_LAYERS),
        "heads": settings.take("num_attention_heads"),
        "mlp": settings.take("intermediate_size"),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_fraction": rope.rotary_fraction,
        "norm_epsilon": settings.take("layer_norm_eps", 1e-5, float, most=LARGEST_EPSILON),
        "tied": settings.take("tie_word_embeddings", False, bool),
        "parallel": settings.take("use_parallel_residual", True, bool),
        "activation": read_activation(settings, "hidden_act", "gelu", activations),
    }


def _settings(model: Decoder, activations: Activations) -> dict[str, Any]:
    first_layer = a(Decoder, model).stack.patterns[0][0]
    kind = Block if isinstance(first_layer, Block) else ParallelBlock
    mlp, first = a(MLP, layers(model, kind)[0].mlp), attentions(model, kind)[0]
    shared = shared_settings(
        model, name_of(mlp.activation, activations),
        norm=LayerNorm, feed_forward=MLP, layer=kind,
    )  # fmt: skip
    del shared["num_key_value_heads"]
    fraction = rotary_fraction_of(first.rotary, head_dim(model, kind))
    shared["rope_parameters"] |= {"partial_rotary_factor": fraction}
    return shared | {
        "layer_norm_eps": shared.pop("rms_norm_eps"),
        "rotary_emb_base": shared.pop("rope_theta"),
        "rotary_pct": fraction,
        "use_parallel_residual": kind is ParallelBlock,
    }


def family(activations: Activations = ACTIVATIONS) -> Family:
    """`activations`: by the names that `hidden_act` may have."""
    return Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        gpt_neox,
        _NAMES,
        lambda settings: _arguments(settings, activations),
        lambda model: _settings(model, activations),
    )


FAMILIES: Sequence[Family] = (family(),)
