"""nanochat's decoder (Karpathy 2026, https://github.com/karpathy/nanochat, `nanochat/gpt.py`).

Shapes: B batch, S sequence, E embed, R repetitions of a layer.
"""

import functools
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, PRNGKeyArray

from lmlib.models.block import Block
from lmlib.models.families.transformer import check_sizes
from lmlib.models.families.windows import short_and_long
from lmlib.models.forward_context import FIRST_RESIDUAL, TOKENS, ForwardContext
from lmlib.models.model import TrunkOutput, WeightGroup
from lmlib.models.part import Part
from lmlib.models.parts.embedding import embedded
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.parts.rope import Rotary
from lmlib.models.parts.ungated_mlp import MLP, relu_squared
from lmlib.models.residual_scales import ResidualScales
from lmlib.models.speedrun.gated_values import GatedValueEmbedding, SharingAttention
from lmlib.models.speedrun.pieces import Backout, DecoderInPieces, Pieces, with_factors
from lmlib.models.speedrun.smear import Smear
from lmlib.models.weights import fold_in_name, jit_init
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import reshard
from lmlib.parallel.matrix import dense


class NanochatDecoder(DecoderInPieces):
    """Norms and smears embedded tokens, and subtracts the stream after layer ⌊layers / 2⌋."""

    rows_may_be_split = True

    backout: Backout | None

    def __init__(self, *sizes: Any, backout: Backout | None, **decoder: Any):
        super().__init__(*sizes, **decoder)
        self.backout = backout

    def trunk(
        self, tokens_BS: Int32[Array, "b s"], context: ForwardContext, cache: Any = None
    ) -> TrunkOutput:
        compute, context = context.compute, context.sharing({TOKENS: tokens_BS})
        assert self.norm is not None
        with jax.named_scope("embed"):
            x_BSE = embedded(dense(self.embedding), tokens_BS, compute.dtype, compute.residual)
            x_BSE = jax.checkpoint(gather(self.norm, compute.dtype))(x_BSE)
            x_BSE, window = self.smeared(x_BSE, context, cache)
            x_BSE = reshard(x_BSE, compute.residual)
        pieces = Pieces(self, context.sharing({FIRST_RESIDUAL: x_BSE}), cache)
        middle_BSE = pieces.run(x_BSE)
        x_BSE = pieces.run(middle_BSE) if len(self.layers_of_pieces) > 1 else middle_BSE
        if self.backout is not None:
            x_BSE = gather(self.backout, compute.dtype)(x_BSE, middle_BSE)
        return pieces.output(x_BSE, window)

    def weight_groups(self) -> tuple[WeightGroup, ...]:
        backout = () if self.backout is None else (WeightGroup("backout", self.backout),)
        return (*super().weight_groups(), *backout)


def nanochat(
    vocab: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int,
    kv_heads: int | None = None,
    rope_theta: float = 100_000.0,
    norm_epsilon: float = 2.0**-23,
    window: int | None = None,
    long_every: int = 4,
    value_embeddings: bool = True,
    residual_scales: bool = True,
    smear: bool = True,
    backout: bool = True,
    logit_cap: float | None = 15.0,
    *,
    key: PRNGKeyArray,
) -> NanochatDecoder:
    """Returns a decoder with new weights, which has no biases and no learned norms.

    Initial values have nanochat's standard deviations; its gates start at about 0.01, ours at 0.

    Args:
      vocab, embed, layers, heads, mlp, kv_heads, norm_epsilon: as in `llama`.
      window, long_every: positions that a layer attends to, except for every `long_every`-th layer
        and the last one; nanochat's window of n tokens before a position is n + 1 here.
      value_embeddings: True if every second layer, and the last one, has a `GatedValueEmbedding`.
      residual_scales: True if layers are `ResidualScales`, which start at 1.15 to 1.05 and, for the
        embedded tokens, 0.20 to 0.05.
      smear, backout: True for `Smear`, and for `Backout`.
      logit_cap: c, if logits z become c · tanh(z / c); `None` leaves them as they are.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_sizes(vocab=vocab, embed=embed, layers=layers, heads=heads, kv_heads=kv_heads, mlp=mlp)
    if embed % heads or embed // heads % 2:
        raise ValueError(
            f"embed = {embed} must be an even multiple of heads = {heads}; nanochat's heads have "
            "128 coordinates"
        )
    head_dim = embed // heads
    norm = functools.partial(RMSNorm, epsilon=norm_epsilon, learned=False)
    of_values = functools.partial(GatedValueEmbedding, vocab, gate_input=min(12, embed))

    @functools.cache
    def maker(has_values: bool, window: int | None) -> Any:
        def make(key: PRNGKeyArray) -> Part:
            attention = SharingAttention(
                embed, heads, kv_heads, head_dim, rotary=Rotary(head_dim, rope_theta),
                window=window, scale=1.2**2 * head_dim**-0.5, norm=functools.partial(norm,
                "head_dim"), value_embedding=of_values if has_values else None, residual_scale=0.0,
                key=fold_in_name(key, "attention"),
            )  # fmt: skip
            fed = MLP(
                embed, mlp, relu_squared, False, residual_scale=0.0, key=fold_in_name(key, "mlp")
            )
            block = Block(attention, fed, norm(embed=embed, key=key), norm(embed=embed, key=key))
            scaled = functools.partial(ResidualScales, key=fold_in_name(key, "layer"))
            return scaled(block) if residual_scales else block

        return make

    def model(key: PRNGKeyArray) -> NanochatDecoder:
        windows = short_and_long(layers, window, long_every)
        makers = [
            maker(value_embeddings and (layers - 1 - i) % 2 == 0, window)
            for i, window in enumerate(windows)
        ]
        middle = layers // 2 + 1
        pieces = [each for each in (makers[:middle], makers[middle:]) if each]
        made = NanochatDecoder(
            vocab, embed, pieces, Smear(embed, min(24, embed), key=key) if smear else None,
            backout=Backout(key=key) if backout else None, norm=norm(embed=embed, key=key),
            logit_cap=logit_cap, embedding_deviation=0.8, key=key,
        )  # fmt: skip
        return _as_published(made, embed)

    return jit_init(model)(key)


def _as_published(model: NanochatDecoder, embed: int) -> NanochatDecoder:
    """The model with the standard deviations and residual scales that nanochat begins with."""
    factors = {"unembedding": 1e-3 * embed**0.5 / 0.35, "mlp.up": 0.4, "table": embed**-0.5}
    model = with_factors(model, factors)

    def scales(model: NanochatDecoder) -> list[Array]:
        layers = itertools.chain(*model.stack.patterns)
        return [
            scale
            for layer in layers
            if isinstance(layer, ResidualScales)
            for scale in (layer.residual, layer.first)
        ]

    last, starts = max(model.stack.depth - 1, 1), []
    for group in model.stack.weight_groups():
        depth_R = jnp.asarray(group.layers, jnp.float32) / last
        starts += [1.15 - 0.10 * depth_R, 0.20 - 0.15 * depth_R]
    return eqx.tree_at(scales, model, starts) if scales(model) else model
