"""OLMo 2 (Team OLMo 2025, arXiv:2501.00656)."""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import shared
from lmlib.models.families.hugging_face.family import Family, Names, Tensor
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.norms import RMSNorm


@variant(without="head_dim window rotary_fraction zero_outputs")
def olmo2(*, rope_theta: float = 500_000.0, norm_epsilon: float = 1e-6, **others: Any) -> Decoder:
    """OLMo 2 (§3.1): Llama with norms after attention and MLP, and query and key norms over all
    heads.

    Outputs of attention and MLP are normed, so their initial values need no scale for depth.
    """
    return transformer(
        rope_theta=rope_theta, norm_epsilon=norm_epsilon, writes=1.0,
        attention=functools.partial(
            Attention,
            norm=functools.partial(RMSNorm, "heads head_dim", norm_epsilon),
            key_norm=functools.partial(RMSNorm, "kv_heads head_dim", norm_epsilon),
        ),
        norms=("attention_after_norm", "mlp_after_norm"), **others,
    )  # fmt: skip


_LAYER = (
    *shared.ATTENTION,
    *shared.MLP,
    *shared.QUERY_KEY_NORMS,
    Tensor("post_attention_layernorm.weight", {"attention_after_norm.scale": ("embed",)}),
    Tensor("post_feedforward_layernorm.weight", {"mlp_after_norm.scale": ("embed",)}),
)
FAMILIES = (
    Family(
        "olmo2", "Olmo2ForCausalLM", olmo2, Names(shared.OUTSIDE, _LAYER),
        shared.llama_keys(norm=shared.epsilon("rms_norm_eps", 1e-5)), Rope(kind="type"),
        shared.SILU | {"attention_bias": False},
        # The class's default pad_token_id is 1, a row of the table that it would never train.
        written=shared.NO_PADDING,
    ),
)  # fmt: skip
