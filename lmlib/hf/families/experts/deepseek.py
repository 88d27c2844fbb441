"""DeepSeek-V3, and Moonlight, which has no latents of queries. Tensors of a layer after the last,
which predict a further token, are unknown here."""

import math
from collections.abc import Sequence
from typing import Any

from lmlib.hf.families.experts.mixtures import GATE_UP_DOWN, IN_CLASS, mixture
from lmlib.hf.families.llama import MLP, NORMS_BEFORE, OUTSIDE
from lmlib.hf.family import Family
from lmlib.hf.names import Names, Tensor
from lmlib.hf.parts import a, layers
from lmlib.hf.rope_settings import read_rope, write_rope
from lmlib.hf.settings import LARGEST_EPSILON, MOST_LAYERS, Settings
from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.families.experts.deepseek import deepseek_v3
from lmlib.models.parts.latent_attention import LatentAttention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope_scaling import Yarn

_ATTENTION = (
    Tensor("self_attn.q_proj.weight", {"attention.query": ("heads query_dim", "embed")}),
    Tensor("self_attn.q_a_proj.weight", {"attention.query_down": ("latent", "embed")}),
    Tensor("self_attn.q_a_layernorm.weight", {"attention.query_norm.scale": ("latent",)}),
    Tensor("self_attn.q_b_proj.weight", {"attention.query_up": ("heads query_dim", "latent")}),
    Tensor(
        "self_attn.kv_a_proj_with_mqa.weight",
        {"attention.down": ("latent", "embed"), "attention.rotary_key": ("rotary_dim", "embed")},
    ),
    Tensor("self_attn.kv_a_layernorm.weight", {"attention.norm.scale": ("latent",)}),
    Tensor(
        "self_attn.kv_b_proj.weight",
        {
            "attention.key": ("heads head_dim", "latent"),
            "attention.value": ("heads value_dim", "latent"),
        },
        each="heads",
    ),
    Tensor("self_attn.o_proj.weight", {"attention.output": ("embed", "heads value_dim")}),
)
_MIXTURE = (
    *mixture(),
    Tensor("mlp.gate.e_score_correction_bias", {"mlp.router.correction": ("choice",)}),
    Tensor("mlp.shared_experts.gate_proj.weight", {"mlp.shared.gate": ("mlp", "embed")}),
    Tensor("mlp.shared_experts.up_proj.weight", {"mlp.shared.up": ("mlp", "embed")}),
    Tensor("mlp.shared_experts.down_proj.weight", {"mlp.shared.down": ("embed", "mlp")}),
)
_RATE = "bias_update_speed"  # lmlib's own key; the paper's name of it
_USUAL_RATE = 1e-3
_SHARPNESS = "mscale_all_dim"


def _arguments(settings: Settings) -> dict[str, Any]:
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("scoring_func", "sigmoid", None)  # nor does transformers read these
    settings.only("topk_method", "noaux_tc", None)
    settings.only("moe_layer_freq", 1, None)
    # Of losses and devices in training, of further tokens, and sums of other keys.
    settings.ignore("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits")
    settings.ignore("num_nextn_predict_layers", "num_mtp_layers", "head_dim", "qk_head_dim")
    heads = settings.take("num_attention_heads")
    # Null means as many as heads; left out, the key would mean 128, whatever there are heads.
    if settings.nullable("num_key_value_heads") is not None:
        settings.only("num_key_value_heads", heads)
    rope = read_rope(settings, scalings=(Yarn,))
    return {
        "vocab": settings.take("vocab_size"),
        "embed": settings.take("hidden_size"),
        "layers": settings.take("num_hidden_layers", most=MOST_LAYERS),
        "heads": heads,
        "mlp": settings.take("intermediate_size"),
        "expert_mlp": settings.take("moe_intermediate_size"),
        "experts": settings.take("n_routed_experts", 256),
        "top": settings.take("num_experts_per_tok", 8),
        "shared_experts": settings.take("n_shared_experts", 1),
        "dense_layers": settings.take("first_k_dense_replace", 3, zero=True),
        "groups": settings.take("n_group", 8),
        "top_groups": settings.take("topk_group", 4),
        "normalized": settings.flag("norm_topk_prob", True),
        "share_scale": settings.take("routed_scaling_factor", 2.5, float),
        "correction_rate": settings.take(_RATE, _USUAL_RATE, float, zero=True),
        "head_dim": settings.take("qk_nope_head_dim", 128),
        "rotary_dim": settings.take("qk_rope_head_dim", 64),
        "value_dim": settings.take("v_head_dim", 128),
        "latent": settings.take("kv_lora_rank", 512),
        "query_latent": settings.nullable("q_lora_rank", 1_536),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "score_sharpness": _sharpness(settings),
        "interleaved": settings.flag("rope_interleave", True),
        "norm_epsilon": settings.take("rms_norm_eps", 1e-6, float, most=LARGEST_EPSILON),
        "tied": settings.take("tie_word_embeddings", False, bool),
    }


def _sharpness(settings: Settings) -> float:
    """Out of the spelling of the rope that `read_rope` has read."""
    new, old = (settings.take(key, {}, dict) for key in ("rope_parameters", "rope_scaling"))
    return float((old or new).get(_SHARPNESS) or 0.0)


def _settings(model: Decoder) -> dict[str, Any]:
    blocks = layers(model, Block)
    attention = a(LatentAttention, blocks[0].attention)
    dense = [block.mlp for block in blocks if isinstance(block.mlp, GatedMLP)]
    mixtures = [a(Mixture, block.mlp) for block in blocks[len(dense) :]]
    expert_mlp = (mixtures[-1].experts if mixtures else dense[0]).down.shape[-2]
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.embedding.shape[-1],
        "num_hidden_layers": len(blocks),
        "num_attention_heads": attention.output.shape[-3],
        "num_key_value_heads": attention.output.shape[-3],
        "intermediate_size": dense[0].down.shape[-2] if dense else expert_mlp,
        "moe_intermediate_size": expert_mlp,
        "first_k_dense_replace": len(dense),
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        **(_mixture_settings(mixtures[-1], expert_mlp) if mixtures else {}),
        "qk_nope_head_dim": attention.key.shape[-1],
        "qk_rope_head_dim": attention.rotary_key.shape[-1],
        "v_head_dim": attention.value.shape[-1],
        "kv_lora_rank": attention.down.shape[-1],
        "q_lora_rank": None if attention.query_down is None else attention.query_down.shape[-1],
        "rope_interleave": attention.rotary.interleaved,
        "rms_norm_eps": a(RMSNorm, model.norm).epsilon,
        "tie_word_embeddings": model.unembedding is None,
        "hidden_act": "silu",
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
        **_rope_settings(attention),
    }


def _mixture_settings(mixture: Mixture, expert_mlp: int) -> dict[str, Any]:
    router, rate = mixture.router, mixture.router.correction_rate
    return {
        "n_routed_experts": router.experts,
        "num_experts_per_tok": router.top,
        "n_shared_experts": a(GatedMLP, mixture.shared).down.shape[-2] // expert_mlp,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "scoring_func": router.scores,
        "norm_topk_prob": router.normalized,
        "routed_scaling_factor": router.scale,
        **({} if rate == _USUAL_RATE else {_RATE: rate}),
    }


def _rope_settings(attention: LatentAttention) -> dict[str, Any]:
    """With `mscale` and `mscale_all_dim`, of which older readers make both the amplitude and what
    scores are multiplied by."""
    content, scaling = write_rope(attention.rotary, "type"), attention.rotary.scaling
    if attention.scale is None or not isinstance(scaling, Yarn) or scaling.factor == 1:
        return content
    query_dim = attention.key.shape[-1] + attention.rotary_key.shape[-1]
    sharper = math.sqrt(attention.scale * math.sqrt(query_dim))

    def written(amplitude: float) -> float:
        return round((amplitude - 1) / (0.1 * math.log(scaling.factor)), 9)

    if sharpness := written(sharper):
        of_both = {"mscale": written(scaling.amplitude * sharper), _SHARPNESS: sharpness}
        for key in ("rope_parameters", "rope_scaling"):
            content[key] = content[key] | of_both
    return content


FAMILIES: Sequence[Family] = (
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        deepseek_v3,
        Names(
            OUTSIDE,
            (*NORMS_BEFORE, *_ATTENTION, *MLP, *_MIXTURE),
            in_class=IN_CLASS,
            not_adapted=GATE_UP_DOWN,
            in_float32=dict.fromkeys(("bfloat16", "float16"), ("e_score_correction_bias",)),
        ),
        _arguments,
        _settings,
    ),
)
