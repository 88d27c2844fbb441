"""Small random models of every family: their configs, and what of them is compared."""

from pathlib import Path

import numpy as np

from lmlib.hf.tensor_files import read_header

GOLDEN = Path(__file__).parents[1] / "hf" / "golden"
GOLDEN_ADAPTERS = Path(__file__).parents[1] / "hf" / "golden_adapters"

SIZES = {
    "vocab_size": 62,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
# Three pairs are turned. The long prompt is beyond the original length, the batch is not, and what
# is continued greedily crosses it.
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [1.5, 4.0, 9.0],
    "original_max_position_embeddings": 100,
}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "routed_scaling_factor": 0.5,
}
_GEMMA = {"head_dim": 8, "sliding_window": 9}
_GPT2 = {
    "vocab_size": 62,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_NEOX = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}

# By name of the golden folder: model_type, and keys of the config.
FAMILIES = {
    "llama": ("llama", SIZES),
    "llama_tied_one_head": (
        "llama",
        SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 6},
    ),
    "llama_3_1": ("llama", SIZES | {"rope_parameters": _LLAMA3}),
    "llama_linear": ("llama", SIZES | {"rope_parameters": _LINEAR}),
    # No axis of the mesh divides its vocabulary.
    "llama_dynamic_one_layer": (
        "llama",
        SIZES | {"rope_parameters": _DYNAMIC, "num_hidden_layers": 1, "vocab_size": 61},
    ),
    "mistral": ("mistral", SIZES | {"sliding_window": 9}),
    "qwen2": ("qwen2", SIZES),
    "qwen2_yarn": ("qwen2", SIZES | {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "qwen2_sliding": (
        "qwen2",
        SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", SIZES | {"head_dim": 8}),
    "gemma2": ("gemma2", SIZES | _GEMMA | {"query_pre_attn_scalar": 12}),
    "gemma3": (
        "gemma3_text",
        SIZES | _GEMMA | {"num_hidden_layers": 8, "num_key_value_heads": 1},
    ),
    "olmo2": ("olmo2", SIZES),
    "phi3": ("phi3", SIZES),
    "phi4_mini": (
        "phi3",
        SIZES | {"partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "phi3_long_rope": (
        "phi3",
        SIZES
        | {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 100,
            "rope_parameters": _LONG_ROPE,
        },
    ),
    "gpt2": ("gpt2", _GPT2),
    "starcoder2": ("starcoder2", SIZES | {"sliding_window": 9, "attention_dropout": 0.1}),
    "smollm3": (
        "smollm3",
        SIZES
        | {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "gpt_neox": ("gpt_neox", _NEOX | {"rotary_pct": 0.5, "hidden_dropout": 0.1}),
    "gpt_neox_in_turn": (
        "gpt_neox",
        _NEOX
        | {
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "rotary_pct": 1.0,
            "rotary_emb_base": 500.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "granite",
        SIZES
        | {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.4,
            "logits_scaling": 5.0,
        },
    ),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 5}),
    "qwen3_moe": (
        "qwen3_moe",
        SIZES
        | {
            "head_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": (
        "olmoe",
        SIZES | {"intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 3},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        SIZES
        | _DEEPSEEK
        | {
            "n_shared_experts": 2,
            "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    # Queries without a latent, as in Moonlight, and pairs as in Llama.
    "deepseek_v3_direct_queries": (
        "deepseek_v3",
        SIZES
        | _DEEPSEEK
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
    ),
    # Alternating windows end with one; a few turns of each pair are within the original positions.
    "gpt_oss": (
        "gpt_oss",
        SIZES
        | {
            "head_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "rope_parameters": _YARN | {"truncate": False},
        },
    ),
    "gpt_oss_tied_full": (
        "gpt_oss",
        SIZES
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _LINEAR,
            "sliding_window": 30,
            "tie_word_embeddings": True,
        },
    ),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Sizes at which a part of a family is missing: the golden folder whose config has other keys.
EDGES = {
    "DeepSeek of dense layers": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "DeepSeek of one dense layer": ("deepseek_v3", {"num_hidden_layers": 1}),
    "DeepSeek of one layer with experts": (
        "deepseek_v3",
        {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    ),
    "DeepSeek of one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "Mixtral of one expert": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "Qwen of tokens that go to all experts": ("qwen3_moe", {"num_experts_per_tok": 6}),
    "gpt-oss without a window": ("gpt_oss", {"layer_types": [_FULL] * 3}),
    "gpt-oss of windows": ("gpt_oss", {"layer_types": [_SLIDING] * 3}),
    "Gemma 2 of global layers": ("gemma2", {"layer_types": [_FULL] * 3}),
    "Gemma 3 of local layers": ("gemma3", {"layer_types": [_SLIDING] * 8}),
    "Gemma 3 of one global layer": (
        "gemma3",
        {"num_hidden_layers": 1, "layer_types": [_FULL]},
    ),
    "Qwen of windows": ("qwen2_sliding", {"max_window_layers": 0}),
    "SmolLM without rotary positions": ("smollm3", {"no_rope_layers": [0] * 4}),
    "Llama of one layer and one head": (
        "llama",
        {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
    ),
}
# Without those that differ from another in constants of their rope alone, which neither gradients
# nor names nor adapters know of.
KINDS = tuple(
    name
    for name in FAMILIES
    if name not in ("llama_3_1", "llama_linear", "qwen2_yarn", "phi3_long_rope")
)
WITH_EXPERTS = (
    *("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "deepseek_v3_direct_queries"),
    *("gpt_oss", "gpt_oss_tied_full"),
)
# By name of the golden folder of adapters: whose they are, what PEFT is told, and which weights of
# ours the folder holds whole.
ADAPTERS = {
    "llama": (
        "llama",
        {
            "r": 2,
            "lora_alpha": 3,
            "use_rslora": True,
            "target_modules": ["q_proj", "o_proj", "down_proj", "embed_tokens", "lm_head"],
        },
        (),
    ),
    "qwen2_saved": (
        "qwen2",
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "up_proj"],
            "modules_to_save": ["embed_tokens", "model.norm", "input_layernorm", "k_proj"],
            "bias": "lora_only",
        },
        (
            "embedding",
            "norm.scale",
            "*attention_norm.scale",
            "*attention.key",
            "*attention.query_bias",
        ),
    ),
}
PROMPT, KEPT = 500, slice(0, None, 25)  # positions whose logits are kept
ROWS, LENGTH = 2, 40  # of the batch that a step is made on
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}


def tokens(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A long prompt, and a batch with the token after each row."""
    random = np.random.default_rng(0)
    return random.integers(0, vocab, (1, PROMPT)), random.integers(0, vocab, (ROWS, LENGTH + 1))


def tensors(file: Path) -> dict[str, np.ndarray]:
    held = read_header(file)
    return {name: each.read(0, each.size).reshape(each.shape) for name, each in held.items()}


def assert_close(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], bound: float
) -> None:
    """Relative to the norm of the tensor, or to a thousandth of all of them."""
    assert set(found) == set(expected)
    whole = np.sqrt(sum(np.sum(np.square(each, dtype=np.float64)) for each in expected.values()))
    for name, each in expected.items():
        size = max(np.linalg.norm(each), 1e-3 * whole)
        assert np.linalg.norm(found[name] - each) <= bound * size, name
