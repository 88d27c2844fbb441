"""Odd config.json files: changes of a golden folder's keys, where `...` takes one away."""

_BASE = {"rope_type": "default", "rope_theta": 500.0}
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_YARN = _BASE | {"rope_type": "yarn", "factor": 4.0}
_LLAMA3 = _BASE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_LONG_AND_SHORT = {"short_factor": [1.0, 1.25, 1.5], "long_factor": [1.5, 4.0, 9.0]}
_LONG = {"rope_type": "longrope", "rope_theta": 500.0, **_LONG_AND_SHORT}
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"

# The golden folder, odd keys, and plain ones that mean the same.
READ = {
    "rope_scaling beside rope_parameters": (
        "llama",
        {"rope_parameters": _BASE, "rope_scaling": _LINEAR, "rope_theta": 77.0},
        {"rope_parameters": _LINEAR | {"rope_theta": 77.0}},
    ),
    "an empty rope_scaling beside rope_parameters": (
        "llama",
        {"rope_parameters": _BASE, "rope_scaling": {}},
        {"rope_parameters": _BASE},
    ),
    "two bases": (
        "llama",
        {"rope_parameters": _BASE, "rope_theta": 77.0},
        {"rope_parameters": _BASE},
    ),
    "a factor of yarn that follows from the lengths": (
        "qwen2",
        {"rope_parameters": _YARN | {"factor": None, "original_max_position_embeddings": 128}},
        {"rope_parameters": _YARN | {"original_max_position_embeddings": 128}},
    ),
    "yarn without original positions": (
        "qwen2",
        {"rope_parameters": _YARN},
        {"rope_parameters": _YARN | {"original_max_position_embeddings": 512}},
    ),
    "yarn that truncates null": (
        "qwen2",
        {"rope_parameters": _YARN | {"truncate": None}},
        {"rope_parameters": _YARN | {"truncate": False}},
    ),
    "llama3 without original positions": (
        "llama",
        {"rope_parameters": _LLAMA3},
        {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 512}},
    ),
    "a share that is turned, said twice": (
        "phi4_mini",
        {"partial_rotary_factor": 0.5, "rope_parameters": _BASE | {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": ..., "rope_parameters": _BASE | {"partial_rotary_factor": 0.5}},
    ),
    "all of a head turned, where shares are unknown": (
        "mistral",
        {"rope_parameters": _BASE | {"partial_rotary_factor": 1.0}, "partial_rotary_factor": 1.0},
        {"rope_parameters": _BASE},
    ),
    "a pattern of layers": (
        "gemma3",
        {"layer_types": ..., "sliding_window_pattern": 3, "_sliding_window_pattern": ...},
        {"layer_types": [_LOCAL, _LOCAL, _GLOBAL, _LOCAL, _LOCAL, _GLOBAL, _LOCAL, _LOCAL]},
    ),
    "a pattern beside the layers": (
        "gemma3",
        {"sliding_window_pattern": 3, "_sliding_window_pattern": 2},
        {},
    ),
    "Gemma's pattern, said again": (
        "gemma2",
        {"layer_types": ..., "sliding_window_pattern": 2},
        {},
    ),
    "LongRoPE in the old spelling": (
        "phi3_long_rope",
        {
            "rope_parameters": ...,
            "rope_theta": 500.0,
            "rope_scaling": {"type": "longrope", **_LONG_AND_SHORT},
        },
        {},
    ),
    "an attention factor of LongRoPE that follows from its factor": (
        "phi3_long_rope",
        {"rope_parameters": _LONG | {"factor": 100.0}},
        {"rope_parameters": _LONG | {"attention_factor": 2**0.5}},
    ),
    "a window that is not used": (
        "qwen2",
        {"sliding_window": 9, "max_window_layers": 1, "layer_types": ...},
        {},
    ),
    "a window that begins at a layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "layer_types": ...,
        },
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": [_GLOBAL, _GLOBAL, _LOCAL],
        },
    ),
    "layers that say where a window begins, and a number that says otherwise": (
        "qwen2_sliding",
        {"max_window_layers": 3},
        {},
    ),
    "a window that begins after the last layer": (
        "qwen2_sliding",
        {"max_window_layers": 3, "layer_types": ...},
        {"use_sliding_window": False, "layer_types": ...},
    ),
    "rope_scaling over rope_parameters of global layers": (
        "gemma3",
        {"rope_parameters": {_GLOBAL: _BASE}, "rope_scaling": _LINEAR},
        {"rope_parameters": {_GLOBAL: _LINEAR | {"rope_theta": 500.0}}},
    ),
    "rotary positions in GPT-NeoX' own words": (
        "gpt_neox",
        {"rope_parameters": ..., "rotary_emb_base": 500.0},
        {"rope_parameters": _BASE | {"partial_rotary_factor": 0.25}},
    ),
    "layers without rotary positions, each so many-th": (
        "smollm3",
        {"no_rope_layers": ..., "no_rope_layer_interval": 2},
        {"no_rope_layers": [1, 0, 1, 0]},
    ),
    "more layers without rotary positions than layers": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1, 0, 0]},
        {"no_rope_layers": [1, 0, 1, 0]},
    ),
    "a window that no layer has": (
        "smollm3",
        {"layer_types": ..., "use_sliding_window": False},
        {"layer_types": ..., "use_sliding_window": True, "sliding_window": None},
    ),
    "the number of experts under the other name": (
        "mixtral",
        {"num_local_experts": ..., "num_experts": 5},
        {},
    ),
    "the number of experts under both names": ("qwen3_moe", {"num_experts": 6}, {}),
    "a window of layers with experts": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 9},
    ),
    "gpt-oss without a word about positions": (
        "gpt_oss",
        {"rope_parameters": ..., "rope_scaling": None},
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "truncate": False,
                "original_max_position_embeddings": 4_096,
            },
        },
    ),
    "gpt-oss' windows in turn": ("gpt_oss", {"layer_types": ..., "sliding_window": 9}, {}),
}  # fmt: skip

# The golden folder, the keys, and how the refusal goes on behind the file's name.
REFUSED = [
    ("mixtral", {"num_experts": 6}, ": num_experts = 6 and num_local_experts = 5 contradict each"),
    ("mixtral", {"num_experts_per_tok": 6}, ": a token goes to 1 to 5 of 5 experts, got top=6"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, ": decoder_sparse_step = 2 is not supported, only 1"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, ": mlp_only_layers = [0] is not supported, only []"),
    ("olmoe", {"clip_qkv": 8.0}, ": clip_qkv = 8.0 is not supported, only null"),
    ("gpt_oss", {"swiglu_limit": 8.0}, ": swiglu_limit = 8.0 is not supported, only 7.0"),
    ("gpt_oss", {"attention_bias": False}, ": attention_bias = False is not supported, only True"),
    ("gpt_oss", {"sliding_window": None}, " has no sliding_window"),
    ("gpt_oss", {"layer_types": [_LOCAL, _GLOBAL]}, f": layer_types = ['{_LOCAL}', "),
    (
        "gpt_oss",
        {"quantization_config": {"quant_method": "mxfp4"}},
        ": the experts are quantized ('mxfp4'), which is not read here: dequantize them with tran",
    ),
    ("gpt_neox", {"hidden_act": "mine"}, ": hidden_act = 'mine' is not supported, only 'gelu' or "),
    ("gpt_neox", {"rope_theta": 77.0}, ": rope_theta = 77.0 is not supported, only 10000.0"),
    ("gpt_neox", {"rotary_pct": 0.25}, ": rotary_pct = 0.25, but config.json: rope_parameters of"),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}, ": no_rope_layers = [1, 0, 1] is not supported"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 2]}, ": no_rope_layers = [1, 0, 1, 2] is not"),
    ("smollm3", {"layer_types": [_LOCAL] * 3}, f": layer_types = ['{_LOCAL}', "),
    ("smollm3", {"use_sliding_window": False}, ": use_sliding_window = False is not supported"),
    ("smollm3", {"sliding_window": ...}, " has no sliding_window"),
    ("granite", {"logits_scaling": 1e-320}, ": logits_scale must be positive, got inf"),
    ("granite", {"residual_multiplier": 0}, ": residual_multiplier = 0 makes no sense"),
    ("llama", {"rope_parameters": {"rope_theta": None}}, ": rope_theta = None is no float"),
    ("llama", {"rope_parameters": ..., "rope_theta": None}, ": rope_theta = None is no float"),
    ("gemma3", {"rope_parameters": ..., "rope_local_base_freq": None}, "rope_theta = None is no"),
    ("llama", {"rope_parameters": {"rope_theta": 0}}, "rope_theta = 0 makes no sense"),
    ("llama", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta = '1e4' is no float"),
    ("llama", {"rope_scaling": "linear"}, ": rope_scaling = 'linear' is no dict"),
    ("llama", {"rope_parameters": {"rope_type": None}}, " of type None is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "of type 'linear' has no factor"),
    ("llama", {"rope_scaling": _LINEAR | {"factor": None}}, "of type 'linear' has no factor"),
    ("llama", {"rope_scaling": _LINEAR | {"factor": 0.5}}, "must be at least 1, got 0.5"),
    ("llama", {"rope_scaling": _LINEAR | {"factor": float("nan")}}, "factor = nan makes no sense"),
    (
        "qwen2",
        {"rope_parameters": _YARN, "max_position_embeddings": ...},
        "'yarn' has no original_max_position_embeddings",
    ),
    (
        "qwen2",
        {
            "rope_parameters": _YARN | {"factor": None, "original_max_position_embeddings": 9},
            "max_position_embeddings": ...,
        },
        "'yarn' has neither factor nor max_position_embeddings",
    ),
    ("qwen2", {"rope_parameters": _YARN | {"beta_fast": 0}}, "beta_fast = 0 makes no sense"),
    ("qwen2", {"rope_parameters": _YARN | {"rope_theta": 1.0}}, "yarn needs a base above 1"),
    (
        "qwen2",
        {"rope_parameters": _YARN | {"original_max_position_embeddings": 12.5}},
        "original_max_position_embeddings = 12.5 is no int",
    ),
    (
        "mistral",
        {"rope_parameters": _BASE | {"partial_rotary_factor": 0.5}},
        ": partial_rotary_factor = 0.5 is not supported, only 1.0",
    ),
    ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ("phi4_mini", {"partial_rotary_factor": 1.0}, "partial_rotary_factor = 1.0, but "),
    (
        "phi4_mini",
        {"rope_parameters": {"partial_rotary_factor": 2}, "partial_rotary_factor": ...},
        "partial_rotary_factor = 2.0 is not supported, only shares up to 1.0",
    ),
    (
        "gemma3",
        {"layer_types": ..., "_sliding_window_pattern": 3},
        "_sliding_window_pattern = 3 is not supported, only 6",
    ),
    (
        "gemma2",
        {"layer_types": ..., "sliding_window_pattern": 3},
        "sliding_window_pattern = 3 is not supported, only 2",
    ),
    (
        "gemma2",
        {"layer_types": [_GLOBAL, _LOCAL, _LOCAL]},
        "only 3 layers of which each n-th is 'full_attention' and all others are 'sliding_atten",
    ),
    ("gemma2", {"layer_types": [_LOCAL, _GLOBAL]}, "only 3 layers of which each n-th"),
    ("gemma2", {"layer_types": [{}, [], 3]}, "only 3 layers of which each n-th"),
    ("gemma3", {"rope_parameters": _BASE}, "rope_parameters: rope_theta = 500.0, rope_type ="),
    ("gemma3", {"rope_parameters": {_GLOBAL: 3}}, "full_attention = 3 is no dict"),
    (
        "gemma3",
        {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 8.0}},
        "of type 'default': factor = 8.0: unknown here",
    ),
    (
        "phi3_long_rope",
        {"original_max_position_embeddings": 99},
        "original_max_position_embeddings = 100, but outside of it 99",
    ),
    (
        "phi3_long_rope",
        {"rope_parameters": _LONG | {"long_factor": [1.0, 4.0]}},
        ": short and long must have a factor for each pair, got 3 and 2",
    ),
    (
        "phi3_long_rope",
        {"partial_rotary_factor": ..., "rope_parameters": _LONG},
        ": LongRope has factors for 3 pairs, but 4 pairs of a head's coordinates are rotated",
    ),
    (
        "phi3_long_rope",
        {"rope_parameters": _LONG | {"short_factor": [1.0, "1", 1.0]}},
        "short_factor and long_factor must be lists of numbers",
    ),
    ("phi3", {"rope_parameters": _YARN}, "of type 'yarn' is not supported, only default, longrope"),
    (
        "qwen2_sliding",
        {"layer_types": [_LOCAL, _GLOBAL, _LOCAL]},
        "only 3 layers of which the first ones are 'full_attention' and the others 'sliding_at",
    ),
    ("qwen2_sliding", {"use_sliding_window": False}, "use_sliding_window = False is not supported"),
    ("qwen2_sliding", {"sliding_window": None}, " has no sliding_window"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping = 0.0 makes no sense"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 makes no sense"),
    (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": ...},
        ": embed = 16 must be a multiple of heads = 3",
    ),
    ("llama", {"num_key_value_heads": 3}, ": heads = 4 must be a multiple of kv_heads = 3"),
    ("llama", {"head_dim": 3}, ": head_dim must be even for rotary positions, got 3"),
    (
        "gpt_neox",
        {"num_attention_heads": 8},
        ": rotary_fraction = 0.5 of head_dim = 2 is 1 coordinates",
    ),
    ("llama", {"rms_norm_eps": -1e-6}, ": rms_norm_eps = -1e-06 makes no sense"),
    ("llama", {"rms_norm_eps": float("inf")}, ": rms_norm_eps = inf makes no sense"),
    ("llama", {"rms_norm_eps": 10**400}, "makes no sense"),
    ("llama", {"rms_norm_eps": 0.0}, ": rms_norm_eps = 0.0 makes no sense: it must be above 0"),
    ("llama", {"rms_norm_eps": 1e30}, ": rms_norm_eps = 1e+30 makes no sense: it must be above 0"),
    ("llama", {"rms_norm_eps": float("nan")}, ": rms_norm_eps = nan makes no sense"),
    ("llama", {"rms_norm_eps": True}, ": rms_norm_eps = True is no float"),
    ("llama", {"rms_norm_eps": "1e-5"}, ": rms_norm_eps = '1e-5' is no float"),
    ("gpt2", {"layer_norm_epsilon": 0}, ": layer_norm_epsilon = 0 makes no sense"),
    ("starcoder2", {"norm_epsilon": 0}, ": norm_epsilon = 0 makes no sense"),
    ("llama", {"num_hidden_layers": 2**31 - 1}, ": num_hidden_layers = 2147483647 makes no sense"),
    (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1]},
            "original_max_position_embeddings": 1,
        },
        ": its numbers make no sense together",
    ),
    ("mistral", {"sliding_window": 0}, ": sliding_window = 0 makes no sense"),
]
SIZES = {
    "llama": (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "intermediate_size", "head_dim", "max_position_embeddings",
    ),
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
}  # fmt: skip
NO_SIZES = (0, -1, True, 4.0, "4", [4], 1e30, 10**30)
