"""Llama with recurrent layers in the place of most attention, for experiments of your own."""

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.families.windows import each_nth
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.recurrent.gated_deltanet import GatedDeltaNet


@variant(without="window")
def llama_hybrid(
    *,
    layers: int,
    attention_every: int = 4,
    recurrent: Callable[..., Part] | None = None,
    attention: Callable[..., Part] = Attention,
    feed_forward: Callable[..., Part] = GatedMLP,
    zero_outputs: bool = False,
    **others: Any,
) -> Decoder:
    """Llama with attention in every `attention_every`-th layer and a recurrence in the others.

    Args:
      recurrent: makes a recurrent mixer from `embed`: `partial(GatedDeltaNet, heads=8, …)`. `None`:
        a `GatedDeltaNet` with the heads of attention, and as many weights in its products.
      attention, feed_forward, zero_outputs: as in `llama`.
    """
    mixer = _like_attention if recurrent is None else in_attentions_place(recurrent)
    attends = each_nth(attention_every, layers)
    return transformer(
        layers=layers, rotary_layers=attends, feed_forward=feed_forward,
        attention=[attention if each else mixer for each in attends],
        writes=0.0 if zero_outputs else None, **others,
    )  # fmt: skip


def in_attentions_place(mixer: Callable[..., Part]) -> Callable[..., Part]:
    """Takes the arguments of `Attention` and gives `mixer` those that it needs."""

    def make(embed: int, *_: Any, residual_scale: float, key: PRNGKeyArray, **__: Any) -> Part:
        return mixer(embed, residual_scale=residual_scale, key=key)

    return make


def _like_attention(embed: int, heads: int, kv_heads: int, head_dim: int, **others: Any) -> Part:
    sizes = functools.partial(
        GatedDeltaNet, heads=heads, kv_heads=kv_heads, key_dim=head_dim // 2, value_dim=head_dim
    )
    return in_attentions_place(sizes)(embed, **others)
