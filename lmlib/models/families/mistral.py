"""Mistral: Llama with a window (Jiang et al. 2023, arXiv:2310.06825)."""

from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.llama import PARTS, llama
from lmlib.models.families.variants import variant


@variant(llama, without=f"rope_scaling rotary_fraction {PARTS}")
def mistral(*, window: int | None = 4_096, **others: Any) -> Decoder:
    """Mistral (§2): Llama whose layers all attend to a window. Arguments as in `llama`; later
    versions have no window."""
    return llama(window=window, **others)
