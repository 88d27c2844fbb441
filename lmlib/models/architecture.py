"""The sizes and settings of a `Decoder`, read off it."""

from typing import NamedTuple

from lmlib.models.block import Block
from lmlib.models.decoder import Decoder
from lmlib.models.parts.attention import Attention
from lmlib.models.parts.mlp import MLP, GatedMLP
from lmlib.models.parts.norms import LayerNorm, RMSNorm
from lmlib.models.parts.rope import Rotary


class Layer(NamedTuple):
    """What can differ from layer to layer."""

    window: int | None
    rotary: Rotary | None


class Architecture(NamedTuple):
    """Sizes are those of the first layer; `layers` has all of them in order. `positions` is 0 where
    none are learned, `scale` `None` for head_dim^-1/2."""

    vocab: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    positions: int
    norm_epsilon: float
    scale: float | None
    attention_cap: float | None
    logit_cap: float | None
    layers: tuple[Layer, ...]


def architecture(model: Decoder) -> Architecture:
    """Reads `model`, whose arrays may be shapes.

    Raises:
      ValueError: if its blocks or its norm are not those that lmlib's families have.
    """
    layers: list[Layer] = []
    for pattern in model.stack:
        mixers = [_attention(block) for block in pattern]
        layers += [Layer(each.window, each.rotary) for each in mixers] * mixers[0].query.shape[0]
    first = model.stack[0][0]
    attention, mlp = _attention(first), first.mlp
    if not isinstance(mlp, GatedMLP | MLP):
        raise ValueError(f"no family here has a {type(mlp).__name__}")
    norm = model.norm
    if not isinstance(norm, RMSNorm | LayerNorm):
        raise ValueError(f"no family here has a {type(norm).__name__} after its last layer")
    vocab, embed = model.embedding.shape
    heads, head_dim = attention.query.shape[-2:]
    return Architecture(
        vocab=vocab,
        embed=embed,
        heads=heads,
        kv_heads=attention.key.shape[-2],
        head_dim=head_dim,
        mlp=mlp.down.shape[-2],
        tied=model.unembedding is None,
        positions=0 if model.positions is None else model.positions.table.shape[0],
        norm_epsilon=norm.epsilon,
        scale=attention.scale,
        attention_cap=attention.soft_cap,
        logit_cap=model.logit_cap,
        layers=tuple(layers),
    )


def _attention(block: Block) -> Attention:
    if not isinstance(block.attention, Attention):
        raise ValueError(f"no family here has a {type(block.attention).__name__}")
    return block.attention
