"""Phi-3 and Phi-4: Llama, published with fused projections.

Source: Abdin et al. 2024, arXiv:2404.14219.
"""

from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import shared
from lmlib.models.families.hugging_face.family import Family, Names, Tensor
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.llama import llama
from lmlib.models.families.variants import variant
from lmlib.models.parts.rope_scaling import LongRope


@variant(without="head_dim")
def phi3(*, window: int | None = None, **others: Any) -> Decoder:
    """Phi-3 and Phi-4 (§2), which compute the same as Llama.

    `rope_scaling` is a `LongRope` for long contexts (Phi-3.5, Phi-4 mini), and `rotary_fraction` is
    3/4 in Phi-4 mini.
    """
    return llama(window=window, **others)


_LAYER = (
    *shared.NORMS_BEFORE,
    shared.query_key_value("self_attn.qkv_proj.weight", after=("embed",)),
    shared.ATTENTION[-1],
    Tensor("mlp.gate_up_proj.weight", {"mlp.gate": ("mlp", "embed"), "mlp.up": ("mlp", "embed")}),
    shared.MLP[-1],
)
_ABSENT: dict[str, Any] = dict.fromkeys(
    ("attention_bias", "mlp_bias", "lm_head_bias"), (False, None)
)
_OF_MINI = dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1, None))
FAMILIES = (
    Family(
        "phi3", "Phi3ForCausalLM", phi3, Names(shared.OUTSIDE, _LAYER),
        shared.llama_keys(shared.WINDOW, norm=shared.epsilon("rms_norm_eps", 1e-5)),
        Rope(scalings=(LongRope,), partial=True, kind="type"), shared.SILU, _ABSENT | _OF_MINI,
        # The class's default pad_token_id is 32,000, which may be outside the vocabulary.
        written=shared.NO_PADDING,
    ),
)  # fmt: skip
