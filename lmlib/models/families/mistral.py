"""Mistral: Llama with a window (Jiang et al. 2023, arXiv:2310.06825)."""

from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import shared
from lmlib.models.families.hugging_face.family import Family
from lmlib.models.families.hugging_face.rope import Rope
from lmlib.models.families.llama import llama
from lmlib.models.families.variants import variant


@variant(without="rope_scaling rotary_fraction")
def mistral(*, window: int | None = 4_096, **others: Any) -> Decoder:
    """Mistral (§2): Llama with a window in all layers; later versions lack it."""
    return llama(window=window, **others)


_WINDOW = shared.WINDOW._replace(default=4_096, null=True)
FAMILIES = (
    Family(
        "mistral", "MistralForCausalLM", mistral, shared.llama_names(),
        shared.llama_keys(shared.HEAD_DIM, _WINDOW, kv_heads=8), Rope(scalings=()), shared.SILU,
    ),
)  # fmt: skip
