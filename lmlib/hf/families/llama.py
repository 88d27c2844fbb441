"""Llama 2 to 3.3, SmolLM 1 and 2, and Mistral."""

from collections.abc import Sequence
from typing import Any

from lmlib.hf.family import Family
from lmlib.hf.names import Names, Tensor
from lmlib.hf.parts import a, attentions, head_dim, layers
from lmlib.hf.rope_settings import read_rope, write_rope
from lmlib.hf.settings import LARGEST_EPSILON, MOST_LAYERS, Settings
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.llama import llama
from lmlib.models.families.mistral import mistral
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary

OUTSIDE = (
    Tensor("model.embed_tokens.weight", {"embedding": ("vocab", "embed")}),
    Tensor("model.norm.weight", {"norm.scale": ("embed",)}),
    Tensor("lm_head.weight", {"unembedding": ("vocab", "embed")}),
)
ATTENTION = (
    Tensor("self_attn.q_proj.weight", {"attention.query": ("heads head_dim", "embed")}),
    Tensor("self_attn.k_proj.weight", {"attention.key": ("kv_heads head_dim", "embed")}),
    Tensor("self_attn.v_proj.weight", {"attention.value": ("kv_heads head_dim", "embed")}),
    Tensor("self_attn.o_proj.weight", {"attention.output": ("embed", "heads head_dim")}),
)
MLP = (
    Tensor("mlp.gate_proj.weight", {"mlp.gate": ("mlp", "embed")}),
    Tensor("mlp.up_proj.weight", {"mlp.up": ("mlp", "embed")}),
    Tensor("mlp.down_proj.weight", {"mlp.down": ("embed", "mlp")}),
)
NORMS_BEFORE = (
    Tensor("input_layernorm.weight", {"attention_norm.scale": ("embed",)}),
    Tensor("post_attention_layernorm.weight", {"mlp_norm.scale": ("embed",)}),
)


def names(*more: Tensor) -> Names:
    """Llama's, and `more` in each layer."""
    return Names(OUTSIDE, (*NORMS_BEFORE, *ATTENTION, *MLP, *more))


def sizes(
    settings: Settings,
    tied: bool = False,
    kv_heads: int | None = None,
    epsilon: float = 1e-6,
    mlp: str = "intermediate_size",
) -> dict[str, Any]:
    """The arguments that Llama and its like share. `tied`, `kv_heads` (`None`: as many as heads)
    and `epsilon`: where config.json does not say; `mlp`: the key of its size."""
    heads = settings.take("num_attention_heads")
    return {
        "vocab": settings.take("vocab_size"),
        "embed": settings.take("hidden_size"),
        "layers": settings.take("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "kv_heads": settings.nullable("num_key_value_heads", kv_heads) or heads,
        "mlp": settings.take(mlp),
        "norm_epsilon": settings.take("rms_norm_eps", epsilon, float, most=LARGEST_EPSILON),
        "tied": settings.take("tie_word_embeddings", tied, bool),
    }


def shared_settings(
    model: Decoder,
    activation: str = "silu",
    rope_kind: str = "rope_type",
    norm: type[Any] = RMSNorm,
    feed_forward: type[Any] = GatedMLP,
    layer: type[Any] = Block,
) -> dict[str, Any]:
    """The keys that `sizes` reads, and those of rotary positions.

    Args:
      activation: the name of the mlp's.
      rope_kind: as in `write_rope`.
      norm, feed_forward, layer: the classes that the family has.

    Raises:
      ValueError: if the model has parts that the family has not.
    """
    blocks, mixers = layers(model, layer), attentions(model, layer)
    rotaries = [mixer.rotary for mixer in mixers if mixer.rotary is not None]
    mlp = a(feed_forward, blocks[0].mlp)
    matrices = mlp.experts if isinstance(mlp, Mixture) else mlp
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.embedding.shape[-1],
        "num_hidden_layers": len(blocks),
        "num_attention_heads": mixers[0].query.shape[-2],
        "num_key_value_heads": mixers[0].key.shape[-2],
        "intermediate_size": matrices.down.shape[-2],
        "rms_norm_eps": a(norm, model.norm).epsilon,
        "tie_word_embeddings": model.unembedding is None,
        "hidden_act": activation,
        **write_rope(rotaries[0] if rotaries else Rotary(head_dim(model, layer)), rope_kind),
    }


def _llama_arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    settings.only("rope_interleaved", False, None)
    rope = read_rope(settings)
    return {
        **sizes(settings),
        "head_dim": settings.take("head_dim", None),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
    }


def _llama_settings(model: Decoder) -> dict[str, Any]:
    own = {"head_dim": head_dim(model), "attention_bias": False, "mlp_bias": False}
    return shared_settings(model) | own


def _mistral_arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    return {
        **sizes(settings, kv_heads=8),
        "head_dim": settings.take("head_dim", None),
        "rope_theta": read_rope(settings, scalings=()).theta,
        "window": settings.nullable("sliding_window", 4_096),
    }


def _mistral_settings(model: Decoder) -> dict[str, Any]:
    own = {"head_dim": head_dim(model), "sliding_window": attentions(model)[0].window}
    return shared_settings(model) | own


FAMILIES: Sequence[Family] = (
    Family("llama", "LlamaForCausalLM", llama, names(), _llama_arguments, _llama_settings),
    Family(
        "mistral", "MistralForCausalLM", mistral, names(), _mistral_arguments, _mistral_settings
    ),
)
