"""A Llama with the parts that public speedruns of GPT-2's loss proved (Jordan et al. 2024,
https://github.com/KellerJordan/modded-nanogpt; Karpathy 2025,
https://github.com/karpathy/nanochat)."""

import functools
from typing import Any

from jaxtyping import PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.families.sizes import head_sizes, short_and_long
from lmlib.models.families.table_values import table_values
from lmlib.models.part import Part
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import MLP, GatedMLP, relu_squared
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary
from lmlib.models.parts.value_embedding import ValueEmbedding
from lmlib.models.residual_scales import ResidualScales
from lmlib.models.stack import segments
from lmlib.models.weights import compiled, fold, residual_scale


def speedrun(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    rope_theta: float = 10_000.0,
    norm_epsilon: float = 1e-6,
    tied: bool = False,
    value_embeddings: int | bool = 2,
    residual_scales: bool = True,
    query_key_norm: bool = True,
    attention_scale: float | None = None,
    squared_relu: bool = True,
    zero_outputs: bool = True,
    logit_cap: float | None = 15.0,
    window: int | None = None,
    long_every: int = 4,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """A pre-norm decoder like `llama`, each of whose other parts can be left out.

    Args:
      vocab, embed, layers, heads, kv_heads, head_dim, mlp, rope_theta, norm_epsilon, tied: as in
        `llama`.
      value_embeddings: each so many-th layer, counted from the last, has a `ValueEmbedding`; True:
        each layer; False: none.
      residual_scales: whether layers are `ResidualScales`.
      query_key_norm: whether queries and keys are normed, each head alone, without learned scales
        (Henry et al. 2020, arXiv:2010.04245).
      attention_scale: of scores; `None`: head_dim^-1/2.
      squared_relu: whether the mlp is max(up x, 0)² rather than a gated silu.
      zero_outputs: as in `llama`.
      logit_cap: c, where a logit z becomes c · tanh(z / c); `None`: it stays.
      window, long_every: positions that each one attends to, but in each `long_every`-th layer and
        the last one, which attend to all; see `short_and_long`. `None`: all layers do.
      key: seed of the weights.

    Raises:
      ValueError: as `llama`, or if `value_embeddings` is negative or `long_every` not positive.
    """
    kv_heads, head_dim = head_sizes(
        embed, heads, kv_heads, head_dim, vocab=vocab, layers=layers, mlp=mlp
    )
    if value_embeddings < 0:
        raise ValueError(f"value_embeddings must not be negative, got {value_embeddings}")
    scale = 0.0 if zero_outputs else residual_scale(layers)
    deviation, last_scale = table_values(embed, tied)
    attention = functools.partial(
        Attention, embed, heads, kv_heads, head_dim, Rotary(head_dim, rope_theta),
        scale=attention_scale, residual_scale=scale,
        norm=functools.partial(RMSNorm, "head_dim", norm_epsilon, learned=False)
        if query_key_norm else None,
    )  # fmt: skip
    feed_forward = functools.partial(
        *((MLP, embed, mlp, relu_squared, False) if squared_relu else (GatedMLP, embed, mlp)),
        residual_scale=scale,
    )

    def norm(key: PRNGKeyArray, initial: float = 1.0) -> RMSNorm:
        return RMSNorm(epsilon=norm_epsilon, initial=initial, embed=embed, key=key)

    def layer(window: int | None, has_values: bool, key: PRNGKeyArray) -> Part:
        more: dict[str, Any] = {}
        if has_values:
            more["value_embedding"] = functools.partial(ValueEmbedding, vocab)
        block = Block(
            attention_norm=norm(fold(key, "attention_norm")),
            attention=attention(window=window, key=fold(key, "attention"), **more),
            mlp_norm=norm(fold(key, "mlp_norm")),
            mlp=feed_forward(key=fold(key, "mlp")),
        )
        return ResidualScales(block, key=fold(key, "scales")) if residual_scales else block

    def model(key: PRNGKeyArray) -> Decoder:
        windows = short_and_long(layers, window, long_every)
        with_values = [
            value_embeddings > 0 and (layers - 1 - i) % value_embeddings == 0 for i in range(layers)
        ]
        kinds = [*zip(windows, with_values, strict=True)]
        makers = {kind: functools.partial(layer, *kind) for kind in dict.fromkeys(kinds)}
        last = norm(fold(key, "norm"), last_scale)
        return Decoder(
            vocab, embed, segments([makers[kind] for kind in kinds]), last, tied, logit_cap,
            embedding_deviation=deviation, key=key,
        )  # fmt: skip

    return compiled(model)(key)
