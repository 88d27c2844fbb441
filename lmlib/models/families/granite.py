"""Granite 3, dense: Llama with scales of embedding, residual, attention and logits.

Source: IBM 2024, "Granite 3.0 Language Models", §2.
"""

import functools
import math
from typing import Any

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.hugging_face import parts, shared
from lmlib.models.families.hugging_face.family import Family, Key
from lmlib.models.families.hugging_face.settings import Settings
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention


@variant(without="window rotary_fraction zero_outputs")
def granite(
    *,
    embed: int,
    heads: int,
    head_dim: int | None,
    tied: bool = True,
    embedding_scale: float = 12.0,
    residual_multiplier: float = 0.22,
    attention_scale: float | None = None,
    logits_scale: float = 1 / 8,
    **others: Any,
) -> Decoder:
    """Granite 3; takes the arguments of `llama` and the following ones.

    Args:
      embedding_scale, logits_scale: factors of embedded tokens, and of logits; initial values are
        as large as in `llama`.
      residual_multiplier: factor of the outputs of attention and MLP, instead of the smaller
        initial values that other families use in deep models.
      attention_scale: factor of scores; `None`: 1 / head_dim.
    """
    scales = embedding_scale, residual_multiplier, attention_scale, logits_scale
    scaled, scale = scaling(embed, heads, head_dim, tied, *scales)
    return transformer(
        embed=embed, heads=heads, head_dim=head_dim, tied=tied,
        attention=functools.partial(Attention, scale=scale), **scaled, **others,
    )  # fmt: skip


def scaling(
    embed: int,
    heads: int,
    head_dim: int | None,
    tied: bool,
    embedding_scale: float,
    residual_multiplier: float,
    attention_scale: float | None,
    logits_scale: float,
) -> tuple[dict[str, Any], float]:
    """Returns the arguments of `transformer` for these scales, and the scale of scores."""
    if attention_scale is None:
        attention_scale = 1 / (head_dim or embed // heads or 1)
    scales = {
        "embedding_scale": embedding_scale,
        "residual_multiplier": residual_multiplier,
        "attention_scale": attention_scale,
        "logits_scale": logits_scale,
    }
    for name, value in scales.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, got {value}")
    return {
        "writes": 1.0,
        "block": functools.partial(Block, residual_multiplier=residual_multiplier),
        "embedding_deviation": (0.5 if tied else 1.0) / embedding_scale,
        "embedding_scale": embedding_scale,
        "logits_scale": logits_scale,
    }, attention_scale


def _inverse(scale: float) -> float:
    """Returns 1 / scale, or an adjacent float if only its own inverse is exactly `scale`."""
    near = 1 / scale
    candidates = near, math.nextafter(near, 0.0), math.nextafter(near, math.inf)
    return next((each for each in candidates if 1 / each == scale), near)


def read_scales(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"logits_scale": 1 / settings.take("logits_scaling", 1.0, float)}


def written_scales(model: Decoder) -> dict[str, Any]:
    return {"logits_scaling": _inverse(model.logits_scale)}


SCALES = (
    Key("embedding_multiplier", "embedding_scale", lambda model: model.embedding_scale, 1.0, float),
    Key(
        "residual_multiplier", "residual_multiplier",
        lambda model: parts.a(Block, parts.layers(model)[0]).residual_multiplier, 1.0, float,
    ),
    Key(
        "attention_multiplier", "attention_scale",
        lambda model: parts.attention(model).scale, 1.0, float,
    ),
)  # fmt: skip
FAMILIES = (
    Family(
        "granite", "GraniteForCausalLM", granite, shared.llama_names(),
        shared.llama_keys(shared.HEAD_DIM, *SCALES), fixed=shared.NO_BIASES,
        reads=read_scales, writes=written_scales,
    ),
)  # fmt: skip
