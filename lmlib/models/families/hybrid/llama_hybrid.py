"""Llama with recurrent layers in the place of most attention, for experiments of your own."""

import functools
from collections.abc import Callable
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.hybrid.alternating import every_nth, mixers
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.recurrent.gated_deltanet import GatedDeltaNet


@variant(without="window")
def llama_hybrid(
    *,
    embed: int,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
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
    attends = every_nth(attention_every, layers)
    if recurrent is None:
        heads_of_keys = heads if kv_heads is None else kv_heads
        size = embed // heads if head_dim is None else head_dim
        recurrent = functools.partial(
            GatedDeltaNet, heads=heads, kv_heads=heads_of_keys, key_dim=size // 2, value_dim=size
        )
    return transformer(
        embed=embed, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        rotary_layers=[layer in attends for layer in range(layers)], feed_forward=feed_forward,
        attention=mixers(layers, attends, attention, recurrent),
        writes=0.0 if zero_outputs else None, **others,
    )  # fmt: skip
