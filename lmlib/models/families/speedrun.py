"""Llama with parts that proved useful in public speedruns of GPT-2's loss.

Sources: Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt; Karpathy 2025,
https://github.com/karpathy/nanochat.
"""

import functools
from typing import Any

from lmlib.models.decoder import Decoder
from lmlib.models.families.transformer import transformer
from lmlib.models.families.variants import variant
from lmlib.models.families.windows import short_and_long
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import GatedMLP
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.ungated_mlp import MLP, relu_squared
from lmlib.models.parts.value_embedding import ValueEmbedding
from lmlib.models.residual_scales import ResidualScales


@variant(without="rope_scaling window rotary_fraction zero_outputs")
def speedrun(
    *,
    vocab: int,
    layers: int,
    norm_epsilon: float = 1e-6,
    value_embeddings: int | bool = 2,
    residual_scales: bool = True,
    query_key_norm: bool = True,
    attention_scale: float | None = None,
    squared_relu: bool = True,
    zero_outputs: bool = True,
    logit_cap: float | None = 15.0,
    window: int | None = None,
    long_every: int = 4,
    **others: Any,
) -> Decoder:
    """A pre-norm decoder like `llama`, with parts that can each be turned off.

    Args:
      value_embeddings: every n-th layer, counted from the last, has a `ValueEmbedding`; True:
        each layer; False: none.
      residual_scales: True if layers are `ResidualScales`.
      query_key_norm: True to norm the queries and keys of each head, without learned scales
        (Henry et al. 2020, arXiv:2010.04245).
      attention_scale: factor of scores; `None`: head_dim^-1/2.
      squared_relu: True if the MLP is max(up x, 0)² rather than a gated silu.
      window, long_every: number of positions that a layer attends to, except for every
        `long_every`-th layer and the last one. See `short_and_long`.
    """
    if value_embeddings < 0:
        raise ValueError(f"value_embeddings must not be negative, got {value_embeddings}")
    norm = functools.partial(RMSNorm, "head_dim", norm_epsilon, learned=False)
    plain = functools.partial(
        Attention, scale=attention_scale, norm=norm if query_key_norm else None
    )
    with_values = functools.partial(plain, value_embedding=functools.partial(ValueEmbedding, vocab))
    squared = functools.partial(MLP, activation=relu_squared, bias=False)
    return transformer(
        vocab=vocab, layers=layers, norm_epsilon=norm_epsilon,
        window=short_and_long(layers, window, long_every),
        attention=[
            with_values if value_embeddings and (layers - 1 - i) % value_embeddings == 0 else plain
            for i in range(layers)
        ],
        feed_forward=squared if squared_relu else GatedMLP,
        layer=ResidualScales if residual_scales else None,
        writes=0.0 if zero_outputs else None, logit_cap=logit_cap, **others,
    )  # fmt: skip
