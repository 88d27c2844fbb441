"""What the config.json of a published model says, and how many parameters it has.

By experiment: each is the model of its family at the smallest published size.
"""

# In each of them, or in most.
_COMMON = {
    "architectures": ["AForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
}

PUBLISHED = {
    "llama_3_2_1b": (
        1_235_814_400,
        {
            "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 16,
            "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
        },
    ),
    "smollm2_135m": (
        134_515_008,
        {
            "model_type": "llama", "attention_bias": False, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
            "max_position_embeddings": 8192, "mlp_bias": False, "num_attention_heads": 9,
            "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
            "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
            "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        },
    ),
    "mistral_7b": (
        7_241_732_096,
        {
            "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": False, "vocab_size": 32000,
        },
    ),
    "qwen2_5_0_5b": (
        494_032_768,
        {
            "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
            "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
            "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "qwen3_0_6b": (
        596_049_920,
        {
            "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 32768,
            "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "gemma2_2b": (
        2_614_341_888,
        {
            "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192,
            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
            "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256000,
        },
    ),
    "gemma3_1b": (
        999_885_952,
        {
            "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
            "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
            "intermediate_size": 6912, "max_position_embeddings": 32768,
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
            "sliding_window_pattern": 6, "vocab_size": 262144,
        },
    ),
    "olmo2_1b": (
        1_484_916_736,
        {
            "model_type": "olmo2", "attention_bias": False, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
            "tie_word_embeddings": False, "vocab_size": 100352,
        },
    ),
    "phi3_mini": (
        3_821_079_552,
        {
            "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "hidden_act": "silu",
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
            "tie_word_embeddings": False, "vocab_size": 32064,
        },
    ),
    "gpt2_124m": (
        124_439_808,
        {
            "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1,
            "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768,
            "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
            "summary_activation": None, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
    ),
    "pythia_70m": (
        70_426_624,
        {
            "model_type": "gpt_neox", "classifier_dropout": 0.1, "hidden_act": "gelu",
            "hidden_size": 512, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 6,
            "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "use_parallel_residual": True, "vocab_size": 50304,
        },
    ),
    "smollm3_3b": (
        3_075_098_624,
        {
            "model_type": "smollm3", "attention_bias": False, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
            "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
            "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
            "vocab_size": 128256,
        },
    ),
    "granite_2b": (
        2_533_531_648,
        {
            "model_type": "granite", "attention_bias": False, "attention_dropout": 0.1,
            "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0,
            "max_position_embeddings": 4096, "mlp_bias": False, "num_attention_heads": 32,
            "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 10000, "tie_word_embeddings": True, "vocab_size": 49155,
        },
    ),
    "starcoder2_3b": (
        3_030_371_328,
        {
            "model_type": "starcoder2", "attention_dropout": 0.1, "embedding_dropout": 0.1,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "intermediate_size": 12288,
            "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-05,
            "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30,
            "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
            "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
        },
    ),
    "mixtral_8x7b": (
        46_702_792_704,
        {
            "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
            "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
        },
    ),
    "qwen3_30b_a3b": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 32768,
            "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "olmoe_1b_7b": (
        6_919_161_856,
        {
            "model_type": "olmoe", "attention_bias": False, "clip_qkv": None,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
            "max_position_embeddings": 4096, "norm_topk_prob": False,
            "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False,
            "pad_token_id": 1, "rope_scaling": None, "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304,
        },
    ),
    "moonlight_16b_a3b": (
        15_960_110_208,
        {
            "model_type": "deepseek_v3", "attention_bias": False, "aux_loss_alpha": 0.001,
            "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 11264, "kv_lora_rank": 512, "max_position_embeddings": 8192,
            "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
            "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
            "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
            "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446,
            "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
            "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
        },
    ),
    "gpt_oss_20b": (  # but for its quantization_config
        20_914_757_184,
        {
            "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4,
            "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072, "num_attention_heads": 64,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
            "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
            },
            "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
            "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
        },
    ),
}  # fmt: skip


# Of no experiment: whole files with keys that no class of transformers reads, or that are of other
# heads. By name: how many parameters it has, and what config.json says.
ODDLY_KEYED = {
    "vicuna_7b_16k": (
        6_738_415_616,
        {
            "model_type": "llama", "_name_or_path": "vicuna-7b-v1.5-16k",
            "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096,
            "max_sequence_length": 16384, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "pad_token_id": 0, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 4.0, "type": "linear"},
            "tie_word_embeddings": False, "torch_dtype": "float16",
            "transformers_version": "4.31.0", "use_cache": True, "vocab_size": 32000,
        },
    ),
    "phi4_mini": (  # but for its factors
        3_836_021_760,
        {
            "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
            "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1,
            "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
            "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
            "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096, "pad_token_id": 199999,
            "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
            },
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
    ),
    "distilgpt2": (
        81_912_576,
        {
            "model_type": "gpt2", "_num_labels": 1, "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
            "embd_pdrop": 0.1, "eos_token_id": 50256, "id2label": {"0": "LABEL_0"},
            "initializer_range": 0.02, "label2id": {"LABEL_0": 0}, "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 6, "n_positions": 1024,
            "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "vocab_size": 50257,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        },
    ),
    "gpt2_large": (
        774_030_080,
        {
            "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1,
            "architectures": ["GPT2LMHeadModel"], "bos_token_id": 50256, "embd_pdrop": 0.1,
            "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024, "n_embd": 1280, "n_head": 20, "n_layer": 36, "n_positions": 1024,
            "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
            "summary_activation": None, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True, "summary_type": "cls_index",
            "summary_use_proj": True, "vocab_size": 50257,
        },
    ),
    "gpt2_xl": (
        1_557_611_200,
        {
            "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1,
            "architectures": ["GPT2LMHeadModel"], "bos_token_id": 50256, "embd_pdrop": 0.1,
            "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024, "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024,
            "output_past": True, "resid_pdrop": 0.1, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
            "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        },
    ),
    "starcoder2_7b": (
        7_173_923_840,
        {
            "model_type": "starcoder2", "activation_function": "gelu",
            "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
            "attention_softmax_in_fp32": True, "bos_token_id": 0, "embedding_dropout": 0.1,
            "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608,
            "initializer_range": 0.018042, "intermediate_size": 18432,
            "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384,
            "mlp_type": "default", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
            "num_attention_heads": 36, "num_hidden_layers": 32, "num_key_value_heads": 4,
            "residual_dropout": 0.1, "rope_theta": 1000000,
            "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
            "sliding_window": 4096, "torch_dtype": "bfloat16",
            "transformers_version": "4.37.0.dev0", "use_bias": True, "use_cache": True,
            "vocab_size": 49152,
        },
    ),
    "gpt_oss_120b": (
        116_829_156_672,
        PUBLISHED["gpt_oss_20b"][1]
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36,
            "num_local_experts": 128,
        },
    ),
}  # fmt: skip


def config(name: str) -> dict:
    """The whole content of the config.json."""
    return _COMMON | PUBLISHED[name][1]
