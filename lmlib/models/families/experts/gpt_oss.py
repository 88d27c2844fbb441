"""gpt-oss (OpenAI 2025, arXiv:2508.10925)."""

import functools
from collections.abc import Sequence
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.experts.mixture import Mixture
from lmlib.models.experts.mlps import GatedExperts, clamped_swiglu
from lmlib.models.experts.router import Router
from lmlib.models.families.llama import PARTS, llama
from lmlib.models.families.variants import variant
from lmlib.models.parts.attention import Attention


@variant(llama, without=f"rotary_fraction {PARTS}")
def gpt_oss(
    *,
    layers: int,
    head_dim: int | None = 64,
    rope_theta: float = 150_000.0,
    window: int | Sequence[int | None] | None = 128,
    experts: int = 128,
    top: int = 4,
    **others: Any,
) -> Decoder:
    """gpt-oss (§2). Where it departs from Llama: `experts` instead of each mlp, of which each token
    goes to `top`, with the softmax of their logits as shares and gates that are clamped; biases
    everywhere but in norms; attention with sinks. Arguments as in `llama`; `mlp` is the size of
    each expert.

    Args:
      window: positions that each one attends to in every other layer, from the first on; `None`:
        all. Or one for each layer.
    """
    if window is None or isinstance(window, int):
        window = in_turn(window, layers)
    mixture = functools.partial(
        Mixture, experts=experts, top=top,
        router=functools.partial(Router, normalized=True, bias=True),
        mlps=functools.partial(GatedExperts, gated=clamped_swiglu, bias=True),
    )  # fmt: skip
    return llama(
        layers=layers, head_dim=head_dim, rope_theta=rope_theta, window=window,
        attention=functools.partial(Attention, bias=True, output_bias=True, sinks=True),
        feed_forward=mixture, **others,
    )  # fmt: skip


def in_turn(window: int | None, layers: int) -> list[int | None]:
    """`window` for each other layer, from the first on."""
    return [None if layer % 2 else window for layer in range(layers)]
