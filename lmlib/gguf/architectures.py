"""The architectures of GGUF files: each family's name, settings and changed tensors there.

Names of tensors come from the package `gguf`, which maps Hugging Face's. Source of the rest:
conversion/ and src/models/ in https://github.com/ggml-org/llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lmlib.models.families.hugging_face.parts import FULL, SLIDING

Config = Mapping[str, Any]  # the content of a config.json
WINDOW = "attention.sliding_window"


class Change(NamedTuple):
    """How a tensor in a GGUF file differs from Hugging Face's, both ways."""

    there: Callable[[np.ndarray, Config], np.ndarray]
    back: Callable[[np.ndarray, Config], np.ndarray]
    transposes: bool = False


@dataclass(frozen=True)
class Architecture:
    """One family in GGUF.

    Attributes:
      name: value of `general.architecture`.
      keys: maps names of settings there, without the architecture before them, to config.json's.
      fixed: keys of config.json that a file does not have, and the values that llama.cpp assumes.
      changes: tensors with other values there, by the ends of their names.
    """

    name: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)

    def change(self, name: str) -> Change | None:
        """Returns the change of the tensor `name`, or `None`."""
        return next((each for end, each in self.changes.items() if name.endswith(end)), None)


def heads(config: Config) -> int:
    return config.get("num_attention_heads") or config["n_head"]


def head_dim(config: Config) -> int:
    width = config.get("hidden_size") or config["n_embd"]
    return config.get("head_dim") or width // heads(config)


def _halves_to_pairs(x: np.ndarray, count: int) -> np.ndarray:
    """Reorders each head's rows from two halves to pairs, which llama.cpp turns for Llama."""
    split = x.reshape(count, 2, -1, *x.shape[1:])
    return split.swapaxes(1, 2).reshape(x.shape)


def _pairs_to_halves(x: np.ndarray, count: int) -> np.ndarray:
    split = x.reshape(count, -1, 2, *x.shape[1:])
    return split.swapaxes(1, 2).reshape(x.shape)


def _turned(count: Callable[[Config], int]) -> Change:
    return Change(
        lambda x, config: _halves_to_pairs(x, count(config)),
        lambda x, config: _pairs_to_halves(x, count(config)),
    )


def _regrouped(x: np.ndarray, first: int, second: int) -> np.ndarray:
    """Swaps two factors of the first axis: [first · second · rest] to [second · first · rest]."""
    return x.reshape(first, second, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


_PAIRS = {
    "attn_q.weight": _turned(heads),
    "attn_k.weight": _turned(lambda config: config["num_key_value_heads"]),
}
_TRANSPOSED = Change(lambda x, config: x.T, lambda x, config: x.T, True)
# Gemma's scales have 1 added, which rounds; both programs multiply by the sum.
_PLUS_ONE = Change(lambda x, config: x + 1, lambda x, config: x.astype(np.float32) - 1)
_BY_HEAD = Change(
    lambda x, config: _regrouped(x, heads(config), 3),
    lambda x, config: _regrouped(x, 3, heads(config)),
)
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_KEYS = _SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_HEAD = {"attention.key_length": "head_dim"}
_USED = {"expert_used_count": "num_experts_per_tok"}


def _gemma_fixed(largest: int, period: int) -> dict[str, Callable[[Config], Any]]:
    """Returns what llama.cpp assumes of Gemma; `largest` is the number of layers of the 27B one."""

    def query_scale(config: Config) -> int:
        if config["num_hidden_layers"] == largest:
            return config["hidden_size"] // config["num_attention_heads"]
        return config["head_dim"]

    def layer_types(config: Config) -> list[str]:
        layers = range(config["num_hidden_layers"])
        return [SLIDING if (layer + 1) % period else FULL for layer in layers]

    return {"query_pre_attn_scalar": query_scale, "layer_types": layer_types}


_GEMMA = _KEYS | _HEAD | {WINDOW: "sliding_window"}
_LLAMA = Architecture("llama", _KEYS | _HEAD, changes=_PAIRS)

# By model_type. The first of several with the same name is the one that a file is read as.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Architecture(
        "llama", _KEYS | _HEAD | _USED | {"expert_count": "num_local_experts"}, changes=_PAIRS
    ),
    "qwen2": Architecture("qwen2", _KEYS),
    "qwen3": Architecture("qwen3", _KEYS | _HEAD),
    "qwen3_moe": Architecture(
        "qwen3moe",
        {each: key for each, key in _KEYS.items() if key != "intermediate_size"}
        | _HEAD
        | _USED
        | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": lambda config: True},
    ),
    "olmoe": Architecture(
        "olmoe",
        _KEYS | _USED | {"expert_count": "num_experts"},
        {"norm_topk_prob": lambda config: False, "clip_qkv": lambda config: None},
    ),
    "olmo2": Architecture("olmo2", _KEYS),
    "gemma2": Architecture(
        "gemma2",
        _GEMMA
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        _gemma_fixed(46, 2),
        {"norm.weight": _PLUS_ONE},
    ),
    "gemma3_text": Architecture(
        "gemma3",
        _GEMMA | {"rope.freq_base_swa": "rope_local_base_freq"},
        _gemma_fixed(62, 6),
        {"norm.weight": _PLUS_ONE},
    ),
    "phi3": Architecture("phi3", _KEYS),
    "granite": Architecture(
        "granite",
        _KEYS
        | _HEAD
        | {
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        changes=_PAIRS,
    ),
    "smollm3": Architecture(
        "smollm3",
        _KEYS | _HEAD,
        {
            "no_rope_layers": lambda config: [
                int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])
            ]
        },
        _PAIRS,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {each: key for each, key in _KEYS.items() if key != "rms_norm_eps"}
        | {"attention.layer_norm_epsilon": "norm_epsilon"},
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "block_count": "n_layer",
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        changes=dict.fromkeys(
            ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
            _TRANSPOSED,
        ),
    ),
    "gpt_neox": Architecture(
        "gptneox",
        _SIZES
        | {
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
            "rope.freq_base": "rotary_emb_base",
        },
        changes={"attn_qkv.weight": _BY_HEAD, "attn_qkv.bias": _BY_HEAD},
    ),
}
