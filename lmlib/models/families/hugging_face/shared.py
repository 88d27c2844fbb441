"""Tensors and keys shared by families, all taken from Llama, and Llama's own declaration.

It covers Llama 2 to 3.3 and SmolLM 1 and 2. It is not in the module of `llama`, because training
needs none of this.
"""

from collections.abc import Sequence
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts
from lmlib.models.families.hugging_face.family import Family, Key, Names, Tensor
from lmlib.models.families.llama import llama
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm

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
BIASES = (
    Tensor("self_attn.q_proj.bias", {"attention.query_bias": ("heads head_dim",)}),
    Tensor("self_attn.k_proj.bias", {"attention.key_bias": ("kv_heads head_dim",)}),
    Tensor("self_attn.v_proj.bias", {"attention.value_bias": ("kv_heads head_dim",)}),
)
OUTPUT_BIAS = Tensor("self_attn.o_proj.bias", {"attention.output_bias": ("embed",)})


def query_key_value(
    name: str, before: Sequence[str] = (), after: Sequence[str] = (), suffix: str = "", **how: Any
) -> Tensor:
    """Returns one tensor for queries, keys and values, with axes before and after the heads'."""
    heads = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
    holds = {
        f"attention.{part}{suffix}": (*before, f"{axis} head_dim", *after)
        for part, axis in heads.items()
    }
    return Tensor(name, holds, **how)


HEAD_NORMS = (
    Tensor("self_attn.q_norm.weight", {"attention.query_norm.scale": ("head_dim",)}),
    Tensor("self_attn.k_norm.weight", {"attention.key_norm.scale": ("head_dim",)}),
)
QUERY_KEY_NORMS = (
    Tensor("self_attn.q_norm.weight", {"attention.query_norm.scale": ("heads head_dim",)}),
    Tensor("self_attn.k_norm.weight", {"attention.key_norm.scale": ("kv_heads head_dim",)}),
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
NORM_BIASES = (
    Tensor("input_layernorm.bias", {"attention_norm.bias": ("embed",)}),
    Tensor("post_attention_layernorm.bias", {"mlp_norm.bias": ("embed",)}),
)
MOST_LAYERS = 10_000  # more would exhaust memory before the tensors are checked
LARGEST_EPSILON = 1.0  # norms with larger values would hardly normalize
VOCAB = Key("vocab_size", "vocab", lambda model: model.vocab)
EMBED = Key("hidden_size", "embed", lambda model: model.embedding.shape[-1])
LAYERS = Key(
    "num_hidden_layers", "layers", lambda model: len(parts.layers(model)), most=MOST_LAYERS
)
HEAD_DIM = Key("head_dim", "head_dim", parts.head_dim, None)
SILU = {"hidden_act": "silu"}
NO_BIASES = {**SILU, "attention_bias": False, "mlp_bias": False}
NO_PADDING = {"pad_token_id": None}
WINDOW = Key("sliding_window", "window", lambda model: parts.attention(model).window, None)


def llama_names(*more: Tensor) -> Names:
    """Returns Llama's tensors, and `more` in each layer."""
    return Names(OUTSIDE, (*NORMS_BEFORE, *ATTENTION, *MLP, *more))


def epsilon(name: str, default: float, norm: type[Any] = RMSNorm) -> Key:
    """Returns the key of norms' epsilon."""
    return Key(
        name, "norm_epsilon", lambda model: parts.a(norm, model.norm).epsilon, default, float,
        most=LARGEST_EPSILON,
    )  # fmt: skip


EPSILON = epsilon("rms_norm_eps", 1e-6)


def tied(default: bool) -> Key:
    """Returns the key for tied embeddings."""
    return Key(
        "tie_word_embeddings", "tied", lambda model: model.unembedding is None, default, bool
    )


def mlp_size(model: Decoder, kind: type[Any]) -> int:
    """Returns the size of the first layer's MLP or of its experts; the part must be a `kind`."""
    part = parts.mlp(model, kind)
    return int(getattr(part, "experts", part).down.shape[-2])


def llama_keys(
    *more: Key,
    tied_by_default: bool = False,
    kv_heads: int | None = None,
    norm: Key = EPSILON,
    mlp: type[Any] = GatedMLP,
    mlp_key: str = "intermediate_size",
) -> tuple[Key, ...]:
    """Returns Llama's keys, and `more`.

    Args:
      tied_by_default, kv_heads: defaults; `None`: as many key-value heads as heads.
      norm: the key of `norm_epsilon`.
      mlp, mlp_key: the class of a layer's feed-forward part, and the key of its (or an expert's)
        size.
    """
    return (
        VOCAB,
        EMBED,
        LAYERS,
        Key("num_attention_heads", "heads", lambda model: parts.attention(model).query.shape[-2]),
        Key(
            "num_key_value_heads", "kv_heads", lambda model: parts.attention(model).key.shape[-2],
            kv_heads, null=True,
        ),
        Key(mlp_key, "mlp", lambda model: mlp_size(model, mlp)),
        norm,
        tied(tied_by_default),
        *more,
    )  # fmt: skip


LLAMA = Family(
    "llama", "LlamaForCausalLM", llama, llama_names(), llama_keys(HEAD_DIM), fixed=NO_BIASES,
    only={"rope_interleaved": (False, None)},
)  # fmt: skip
