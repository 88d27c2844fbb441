"""The architectures of GGUF files: each family's name, settings and changed tensors there.

Names of tensors come from the package `gguf`, which maps Hugging Face's. Source of the rest:
conversion/ and src/models/ in https://github.com/ggml-org/llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmlib.gguf.changes import (
    BY_HEAD,
    GATE_UP,
    GATE_UP_BIAS,
    LATENT,
    PAIRS,
    PLUS_ONE,
    RATE,
    TRANSPOSED,
    WITHOUT_SECOND,
    Change,
    Config,
    by_key_head,
    by_kind,
    halves,
    head_dim,
    heads,
    one,
    renamed,
    swapped,
)
from lmlib.models.families.hugging_face.parts import FULL, SLIDING

WINDOW = "attention.sliding_window"
WITH_EXPERTS = " with experts"  # after a model_type that may have them or not


@dataclass(frozen=True)
class Architecture:
    """One family in GGUF.

    Attributes:
      name: value of `general.architecture`.
      keys: maps names of settings there, without the architecture before them, to config.json's.
      fixed: keys of config.json that a file does not have, and the values that llama.cpp assumes.
      changes: tensors that differ there, by the ends of Hugging Face's names.
      writes: further settings there, from config.json's content.
      reads: inverse of `writes`, which takes them out of the settings there; it also has the keys
        that `keys` and `fixed` gave.
    """

    name: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    writes: Callable[[Config], dict[str, Any]] = lambda config: {}
    reads: Callable[[dict[str, Any], Config], dict[str, Any]] = lambda settings, config: {}

    def change(self, name: str) -> tuple[str, Change] | None:
        """Returns the end of Hugging Face's `name` that has a change, and it, or `None`."""
        return next((each for each in self.changes.items() if name.endswith(each[0])), None)


_KV_HEADS, _MLP = "attention.head_count_kv", "feed_forward_length"
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    _MLP: "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_KEYS = _SIZES | {
    _KV_HEADS: "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_HEAD = {"attention.key_length": "head_dim"}
_USED = {"expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = (
    {each: key for each, key in _KEYS.items() if each != _MLP}
    | _HEAD
    | _USED
    | {"expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
)


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


def _kv_heads_of_layers(attention: str) -> Callable[[Config], dict[str, Any]]:
    """Returns a function that writes 0 for layers whose type is not `attention`."""

    def written(config: Config) -> dict[str, Any]:
        count = config["num_key_value_heads"]
        counts = [count if kind == attention else 0 for kind in config["layer_types"]]
        return {_KV_HEADS: counts}

    return written


def _layers_of_kv_heads(
    attention: str, other: str
) -> Callable[[dict[str, Any], Config], dict[str, Any]]:
    """Returns the inverse of `_kv_heads_of_layers`."""

    def read(settings: dict[str, Any], config: Config) -> dict[str, Any]:
        counts = settings.pop(_KV_HEADS)
        if isinstance(counts, int):
            counts = [counts] * config["num_hidden_layers"]
        return {
            "num_key_value_heads": max(counts) or heads(config),
            "layer_types": [attention if count else other for count in counts],
        }

    return read


_LATENT_KEYS = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_used_count": "topk_group",
}
_QUERY_LATENT, _SIGMOID = "attention.q_lora_rank", 2  # of gguf.ExpertGatingFuncType
_OF_QUERIES = "attention.key_length_mla"
_LITE = (26, 27)  # with these numbers of layers, llama.cpp has no latents of queries


def _latent(config: Config) -> dict[str, Any]:
    """Returns the settings of latent attention: keys and values are the latents there."""
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        _KV_HEADS: 1,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        _OF_QUERIES: config["qk_nope_head_dim"] + rotary,
        "expert_gating_func": _SIGMOID,
    }


def _read_latent(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    if _OF_QUERIES not in settings:
        raise ValueError("it has keys and values in one tensor: convert the model again")
    size = settings.pop(_OF_QUERIES) - config["qk_rope_head_dim"]
    found = {"qk_nope_head_dim": size, "num_key_value_heads": heads(config)}
    for key, value in _latent({**config, **found}).items():
        if key in settings and (own := settings.pop(key)) != value:
            raise ValueError(f"its {key} is {own!r:.80}, not {value}")
    return found


def _kimi(config: Config) -> dict[str, Any]:
    linear = config["linear_attn_config"]
    if linear.get("num_heads") != config["num_attention_heads"]:
        raise ValueError("llama.cpp has kimi_linear only with as many heads in all layers")
    attends = linear["full_attn_layers"]  # from 1
    counts = [int(layer + 1 in attends) for layer in range(config["num_hidden_layers"])]
    return {
        **_latent(config),
        _KV_HEADS: counts,
        **{key: linear[own] for key, own in _KDA.items()},
    }


def _read_kimi(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    counts = list(enumerate(settings.pop(_KV_HEADS), 1))
    linear = {own: settings.pop(key) for key, own in _KDA.items()}
    linear |= {
        "num_heads": heads(config),
        "kda_layers": [layer for layer, count in counts if not count],
        "full_attn_layers": [layer for layer, count in counts if count],
    }
    return {"linear_attn_config": linear, **_read_latent(settings, config)}


_KDA = {"kda.head_dim": "head_dim", "ssm.conv_kernel": "short_conv_kernel_size"}


def _deepseek(config: Config) -> dict[str, Any]:
    if (latent := config["q_lora_rank"]) and config["num_hidden_layers"] in _LITE:
        raise ValueError(
            f"llama.cpp has deepseek_v3 of {config['num_hidden_layers']} layers only without "
            "q_lora_rank"
        )
    return {**_latent(config), _QUERY_LATENT: latent or 0}


def _read_deepseek(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    usual = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    if "expert_gating_func" not in settings:
        raise ValueError("its experts' scores are a softmax: only sigmoids are supported")
    return {
        **{key: value for key, value in usual.items() if key not in config},
        **_read_latent(settings, config),
        "q_lora_rank": settings.pop(_QUERY_LATENT, 0) or None,
    }


def _granite_hybrid(
    shared: str, size: str, keys: dict[str, str], fixed: dict[str, Callable[[Config], Any]]
) -> Architecture:
    """Returns Granite 4; `shared` has the MLP that all tokens use, whose size is the key `size`."""
    changes = PAIRS | {
        "mamba.conv1d.weight": WITHOUT_SECOND,
        "mamba.dt_bias": renamed("mamba.dt_proj.bias"),
        "mamba.D": one(lambda x, config: x[:, None], lambda x, config: x[:, 0]),
        # llama.cpp multiplies by the rate itself, so the file holds its exponential.
        "mamba.A_log": one(
            lambda x, config: -np.exp(x)[:, None],
            lambda x, config: np.log(-x[:, 0].astype(np.float32)),
        ),
        "mamba.norm.weight": one(
            lambda x, config: x.reshape(config["mamba_n_groups"], -1),
            lambda x, config: x.reshape(-1),
        ),
        "shared_mlp.input_linear.weight": halves(0, shared),
        "shared_mlp.output_linear.weight": renamed(f"{shared}.down_proj.weight"),
        "block_sparse_moe.input_linear.weight": halves(1, "mlp.experts"),
    }
    return Architecture(
        "granitehybrid",
        _GRANITE_HYBRID_KEYS | keys,
        _MAMBA | fixed,
        changes,
        lambda config: _positions(config) | {size: config["shared_intermediate_size"]},
        _read_positions,
    )


def _positions(config: Config) -> dict[str, Any]:
    """Returns the settings of Granite 4: whether it has rotary positions, and key-value heads."""
    if "time_step_limit" in config:
        raise ValueError("llama.cpp has granitemoehybrid only without time_step_limit")
    rotary = config["position_embedding_type"] == "rope"
    theta = {"rope.freq_base": config["rope_theta"]} if rotary else {}
    inner = {"ssm.inner_size": 2 * config["hidden_size"]}
    return {**_kv_heads_of_layers(FULL)(config), _ROTARY: rotary, **theta, **inner}


def _read_positions(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    found = _layers_of_kv_heads(FULL, "linear_attention")(settings, config)
    if settings.pop(_ROTARY, True):
        found["position_embedding_type"] = "rope"
    else:
        settings.pop("rope.dimension_count", None)
    if (theta := settings.pop("rope.freq_base", None)) is not None:
        found["rope_theta"] = theta
    if shared := settings.pop(_SHARED_MLP, None):
        found["shared_intermediate_size"] = shared
    if settings.pop("ssm.inner_size") != 2 * config["hidden_size"]:
        raise ValueError("its ssm.inner_size is not twice its embedding_length")
    return found


_ROTARY, _SHARED_MLP = "rope.scaling.finetuned", "expert_shared_feed_forward_length"
_GRANITE_KEYS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
_GRANITE_HYBRID_KEYS = (
    {each: key for each, key in _KEYS.items() if each not in (_KV_HEADS, "rope.freq_base")}
    | _HEAD
    | _GRANITE_KEYS
    | {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
    }
)
_MAMBA: dict[str, Callable[[Config], Any]] = {
    "mamba_expand": lambda config: 2,
    "mamba_conv_bias": lambda config: True,
    "mamba_proj_bias": lambda config: False,
}


def _qwen3_next(config: Config) -> dict[str, Any]:
    return {
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_key_head_dim"],
        _RECURRENT: [kind != FULL for kind in config["layer_types"]],
    }


def _read_qwen3_next(settings: dict[str, Any], config: Config) -> dict[str, Any]:
    layers, interval = config["num_hidden_layers"], settings.pop("full_attention_interval", 4)
    usual = [(layer + 1) % interval != 0 for layer in range(layers)]
    recurrent = settings.pop(_RECURRENT, usual)
    size = settings.pop("ssm.inner_size")
    if size != (own := config["linear_num_value_heads"] * config["linear_key_head_dim"]):
        raise ValueError(f"its ssm.inner_size is {size!r:.80}, not {own}")
    return {
        "layer_types": ["linear_attention" if each else FULL for each in recurrent],
        "partial_rotary_factor": settings.pop("rope.dimension_count") / head_dim(config),
    }


def _gelu(config: Config) -> dict[str, Any]:
    """Raises ValueError unless the MLPs have a GELU. llama.cpp has only its tanh form."""
    if not (activation := config["hidden_act"]).startswith("gelu"):
        raise ValueError(f"llama.cpp has gpt_neox only with GELUs, not hidden_act = {activation}")
    return {}


_RECURRENT = "attention.recurrent_layers"
_GEMMA = _KEYS | _HEAD | {WINDOW: "sliding_window"}
_LLAMA = Architecture("llama", _KEYS | _HEAD, changes=PAIRS)

# By model_type. The first of several with the same name is the one that a file is read as.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": Architecture(
        "llama", _KEYS | _HEAD | _USED | {"expert_count": "num_local_experts"}, changes=PAIRS
    ),
    "qwen2": Architecture("qwen2", _KEYS),
    "qwen3": Architecture("qwen3", _KEYS | _HEAD),
    "qwen3_moe": Architecture("qwen3moe", _QWEN_EXPERTS, {"norm_topk_prob": lambda config: True}),
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
        {"norm.weight": PLUS_ONE},
    ),
    "gemma3_text": Architecture(
        "gemma3",
        _GEMMA | {"rope.freq_base_swa": "rope_local_base_freq"},
        _gemma_fixed(62, 6),
        {"norm.weight": PLUS_ONE},
    ),
    "phi3": Architecture("phi3", _KEYS),
    "granite": Architecture("granite", _KEYS | _HEAD | _GRANITE_KEYS, changes=PAIRS),
    "smollm3": Architecture(
        "smollm3",
        _KEYS | _HEAD,
        {
            "no_rope_layers": lambda config: [
                int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])
            ]
        },
        PAIRS,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {each: key for each, key in _KEYS.items() if key != "rms_norm_eps"}
        | {"attention.layer_norm_epsilon": "norm_epsilon"},
    ),
    "lfm2": Architecture(
        "lfm2",
        _SIZES
        | {
            "attention.layer_norm_rms_epsilon": "norm_eps",
            "rope.freq_base": "rope_theta",
            "shortconv.l_cache": "conv_L_cache",
        },
        {
            "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
            "conv_bias": lambda config: False,
            "block_auto_adjust_ff_dim": lambda config: False,
        },
        {"conv.conv.weight": WITHOUT_SECOND},
        _kv_heads_of_layers(FULL),
        _layers_of_kv_heads(FULL, "conv"),
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        _KEYS
        | _HEAD
        | _USED
        | {
            WINDOW: "sliding_window",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        {
            "layer_types": lambda config: [
                FULL if layer % 2 else SLIDING for layer in range(config["num_hidden_layers"])
            ],
            "tie_word_embeddings": lambda config: False,
        },
        {
            "self_attn.sinks": renamed("self_attn.sinks.weight"),
            "gate_up_proj": GATE_UP,
            "gate_up_proj_bias": GATE_UP_BIAS,
            "experts.down_proj": swapped("experts.down_proj.weight"),
            "experts.down_proj_bias": renamed("experts.down_proj.bias"),
        },
    ),
    "deepseek_v3": Architecture(
        "deepseek2",
        {each: key for each, key in _KEYS.items() if each != _KV_HEADS}
        | _USED
        | _LATENT_KEYS
        | {
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_group_count": "n_group",
        },
        {"rope_interleave": lambda config: True},
        {
            "kv_b_proj.weight": LATENT,
            "e_score_correction_bias": renamed("e_score_correction.bias"),
        },
        _deepseek,
        _read_deepseek,
    ),
    "granitemoehybrid": _granite_hybrid(
        "mlp", _MLP, {_MLP: "shared_intermediate_size"}, {"num_local_experts": lambda config: 0}
    ),
    "granitemoehybrid" + WITH_EXPERTS: _granite_hybrid(
        "mlp.shared_expert", _SHARED_MLP, _USED | {"expert_count": "num_local_experts"}, {}
    ),
    "qwen3_next": Architecture(
        "qwen3next",
        _QWEN_EXPERTS
        | {
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
        },
        {
            "linear_value_head_dim": lambda config: config["linear_key_head_dim"],
            "norm_topk_prob": lambda config: True,
            "mlp_only_layers": lambda config: [],
        },
        {
            "linear_attn.norm.weight": renamed("linear_attn.norm.weight"),
            "norm.weight": PLUS_ONE,
            "linear_attn.conv1d.weight": WITHOUT_SECOND,
            "linear_attn.dt_bias": renamed("linear_attn.dt_proj.bias"),
            "linear_attn.A_log": RATE,
            "in_proj_qkvz.weight": Change(
                by_kind, by_key_head, ("in_proj_qkv.weight", "in_proj_z.weight")
            ),
        },
        _qwen3_next,
        _read_qwen3_next,
    ),
    "kimi_linear": Architecture(
        "kimi-linear",
        _SIZES
        | _LATENT_KEYS
        | {
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_token",
            "expert_shared_count": "num_shared_experts",
            "expert_group_count": "num_expert_group",
        },
        {"q_lora_rank": lambda config: None, "moe_renormalize": lambda config: True},
        {
            "kv_b_proj.weight": LATENT,
            "e_score_correction_bias": renamed("e_score_correction.bias"),
            "self_attn.dt_bias": renamed("self_attn.dt_proj.bias"),
            "self_attn.A_log": RATE,
        },
        _kimi,
        _read_kimi,
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
        changes=dict.fromkeys(("c_attn.weight", "c_proj.weight", "c_fc.weight"), TRANSPOSED),
    ),
    "gpt_neox": Architecture(
        "gptneox",
        _SIZES
        | {
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
            "rope.freq_base": "rotary_emb_base",
        },
        changes={"query_key_value.weight": BY_HEAD, "query_key_value.bias": BY_HEAD},
        writes=_gelu,
    ),
}
