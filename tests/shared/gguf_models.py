"""Small random models of the families in GGUF files, without compiling anything."""

import json

import jax
import numpy as np

from lmlib.hf.families import described_by, family_of
from lmlib.hf.names import concatenate_shares, placed
from lmlib.hf.tensor_files import begin_files, laid_out, write
from lmlib.parallel.axes import map_weights

_SIZES = {
    "vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# These positions and `rope_theta` put the bounds of yarn almost at the whole pairs 3 and 5.
_WHOLE_YARN = _YARN | {"original_max_position_embeddings": 36_397, "truncate": False}
_WHOLE_THETA = 1_048_631.0
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 6}
_DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 4,
    "num_experts_per_tok": 3, "topk_group": 2, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_conv": 3,
}  # fmt: skip
# Each family of lmlib that llama.cpp has, with settings that could go wrong.
CONFIGS = {
    "llama": {"model_type": "llama"},
    "llama_3_1": {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": _LLAMA3},
    "llama_linear": {
        "model_type": "llama", "tie_word_embeddings": True, "head_dim": 24,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 150},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_yarn": {"model_type": "qwen2", "rope_scaling": _YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 32,
        "norm_topk_prob": True, **_EXPERTS,
    },
    "olmoe": {"model_type": "olmoe", "num_key_value_heads": 4, **_EXPERTS},
    "olmo2": {"model_type": "olmo2"},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32,
        "sliding_window": 9, "num_hidden_layers": 7, "num_key_value_heads": 1,
    },
    "phi3": {"model_type": "phi3", "sliding_window": None, "pad_token_id": None},
    "phi4_mini": {
        "model_type": "phi3", "sliding_window": None, "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True, "pad_token_id": None,
    },
    "phi3_long_rope": {
        "model_type": "phi3", "sliding_window": None, "original_max_position_embeddings": 300,
        "max_position_embeddings": 1200, "pad_token_id": None,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1 + i / 8 for i in range(8)],
            "long_factor": [1.5 + i for i in range(8)],
        },
    },
    "granite": {
        "model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.4, "logits_scaling": 5.0,
    },
    "lfm2": {
        "model_type": "lfm2", "num_hidden_layers": 5, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
        "conv_L_cache": 4,
    },
    "lfm2_untied": {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": False, "full_attn_idxs": [2],
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 6, "sliding_window": 9,
        "num_experts_per_tok": 3, "rope_theta": _WHOLE_THETA, "rope_scaling": _WHOLE_YARN,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", **_DEEPSEEK, "q_lora_rank": 12, "first_k_dense_replace": 1,
        "n_shared_experts": 2, "routed_scaling_factor": 0.5,
        "rope_scaling": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "moonlight": {
        "model_type": "deepseek_v3", **_DEEPSEEK, "q_lora_rank": None, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
        "tie_word_embeddings": True,
    },
    "granite_hybrid": {
        "model_type": "granitemoehybrid", **_MAMBA, "num_local_experts": 6, "mamba_n_groups": 1,
        "num_experts_per_tok": 3, "shared_intermediate_size": 32, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3, "attention_multiplier": 0.4, "logits_scaling": 5.0,
    },
    "granite_hybrid_dense": {
        "model_type": "granitemoehybrid", **_MAMBA, "num_local_experts": 0, "mamba_n_groups": 4,
        "shared_intermediate_size": 96, "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 16, **_EXPERTS,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "partial_rotary_factor": 0.5,
    },
    "kimi_linear": {
        "model_type": "kimi_linear", "num_hidden_layers": 4, "num_key_value_heads": 4,
        "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_token": 3,
        "num_expert_group": 3, "topk_group": 2, "kv_lora_rank": 20, "q_lora_rank": None,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "routed_scaling_factor": 0.5, "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 4, "head_dim": 16,
            "short_conv_kernel_size": 3,
        },
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "pad_token_id": None},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": None},
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 160, "n_embd": 64, "n_layer": 3, "n_head": 4,
        "n_positions": 256,
    },
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.25},
    "gpt_neox_in_turn": {"model_type": "gpt_neox", "use_parallel_residual": False},
}  # fmt: skip


def random_model(config):
    """Returns a model with random weights as NumPy arrays; norms are about 1, other weights 0.3."""
    known = _SIZES if config["model_type"] != "gpt2" else {}
    if config["model_type"] == "gpt_neox":
        known = {key: value for key, value in known.items() if key != "num_key_value_heads"}
    shapes = described_by({**known, **config}, "config.json").shapes
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: random.normal(0.02, 0.3, x.shape).astype(np.float32) if x.ndim else x, shapes
    )


def tensors_of(model):
    """The tensors of a Hugging Face folder with the model, by name."""
    family, _ = family_of(model)
    weights = {}
    map_weights(lambda weight, array: weights.update({weight.path: array}), model)
    return {
        each.name: concatenate_shares(
            [piece.share for piece in each.pieces],
            [weights[piece.path][piece.at] for piece in each.pieces],
        )
        for each in placed(model, family.names)
    }


def write_folder(model, folder):
    """Writes the model as a Hugging Face folder, in float32."""
    folder.mkdir(parents=True)
    tensors = tensors_of(model)
    files = laid_out(folder, {name: (x.dtype, x.shape) for name, x in tensors.items()}, 10**9)
    begin_files(files)
    for name, values in tensors.items():
        write(files[name], 0, values)
    (folder / "config.json").write_text(json.dumps(family_of(model)[1]))
