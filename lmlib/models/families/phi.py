"""Phi-3 and Phi-4: Llama, published with its projections fused (Abdin et al. 2024,
arXiv:2404.14219)."""

from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import PARTS, llama
from lmlib.models.families.variants import variant


@variant(llama, without=f"head_dim {PARTS}")
def phi3(*, window: int | None = None, **others: Any) -> Decoder:
    """Phi-3 and Phi-4 (§2): Llama in all its math. Arguments as in `llama`: `rope_scaling` is a
    `LongRope` in long contexts (Phi-3.5, Phi-4 mini), and `rotary_fraction` 3/4 of Phi-4 mini."""
    return llama(window=window, **others)
