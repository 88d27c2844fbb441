"""Multi-token prediction: a decoder with heads for the tokens after the next one.

Source: DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437), §2.2. The head of depth k reads the
features of depth k - 1 at position i, where depth 0 is the decoder itself, and the embedding of
token i + k. It predicts token i + k + 1, with the decoder's own unembedding.

Shapes: B batch, S sequence, E embed, J joined: twice embed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray

from lmlib.models.decoder import Decoder
from lmlib.models.forward_context import TOKENS, ForwardContext
from lmlib.models.matmul import matmul
from lmlib.models.model import TrunkOutput, WeightGroup
from lmlib.models.part import ActivationNames, AuxOutputs, Norm, Part
from lmlib.models.parts.embedding import embedded
from lmlib.models.parts.norms import RMSNorm
from lmlib.models.scan import policy
from lmlib.models.stack import Stack
from lmlib.models.weights import fan_in, fill, fold_in_name, jit_init, weight
from lmlib.parallel.gathering import gather
from lmlib.parallel.layout import COMPUTE, reshard, spec
from lmlib.parallel.matrix import dense


class Combination(Part):
    """matrix · [norm(embedding); norm(features)] (eq. 21, in the order of DeepSeek and of vLLM)."""

    rows_may_be_split = True

    names = ActivationNames(scopes=("combination",))

    embedding_norm: Norm
    features_norm: Norm
    matrix: Float[Array, "joined embed"] = weight(
        fan_in("joined"), rules={"joined": COMPUTE["mlp"]}
    )

    def __init__(self, embed: int, embedding_norm: Norm, features_norm: Norm, *, key: PRNGKeyArray):
        self.embedding_norm, self.features_norm = embedding_norm, features_norm
        fill(self, key, joined=2 * embed, embed=embed)

    @jax.named_scope("combination")
    def __call__(
        self,
        e_BSE: Float[Array, "b s embed"],
        h_BSE: Float[Array, "b s embed"],
        context: ForwardContext,
    ) -> Float[Array, "b s embed"]:
        """Returns a residual stream. The product is summed over `tensor`, as an MLP's last one."""
        normed = self.embedding_norm(e_BSE), self.features_norm(h_BSE)
        x_BSJ = reshard(jnp.concatenate(normed, axis=-1), "batch seq mlp")
        precision, residual = context.compute.precision("projections"), context.compute.residual
        return matmul("bsj,je->bse", x_BSJ, self.matrix, precision, spec(residual))


class Predictor(Part):
    """The head of one depth: a combination, one layer, and the last norm."""

    rows_may_be_split = True

    combination: Combination
    stack: Stack
    norm: Norm | None

    def __call__(
        self, e_BSE: Array, h_BSE: Array, context: ForwardContext, cache: Any = None
    ) -> TrunkOutput:
        """Returns the residual stream (eq. 22), from embeddings and features of the depth below."""
        compute = context.compute

        def combined(e_BSE: Array, h_BSE: Array) -> Array:
            e_BSE, h_BSE = (checkpoint_name(x_BSE, "head_input") for x_BSE in (e_BSE, h_BSE))
            return gather(self.combination, compute.dtype)(e_BSE, h_BSE, context)

        x_BSE = jax.checkpoint(combined, policy=policy(compute, ()))(e_BSE, h_BSE)
        return self.stack(x_BSE, context, cache)

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """Like a model's: the row is the second axis."""
        return self.stack.empty_cache(rows, length, dtype)

    def updated(self, tallies: Any) -> "Predictor":
        return eqx.tree_at(lambda head: head.stack, self, self.stack.updated(tallies))


class MultiTokenDecoder(Decoder):
    """A decoder with a head for each depth, from 1 on.

    Only `ahead` computes the heads, for the objective `lmlib.losses.multi_token.MultiToken` and for
    speculative decoding. All else is the decoder's: logits, caches, metrics, FLOPs.
    """

    rows_may_be_split = True

    predictors: tuple[Predictor, ...]

    def __init__(self, decoder: Decoder, predictors: Sequence[Predictor]):
        for field in dataclasses.fields(Decoder):
            setattr(self, field.name, getattr(decoder, field.name))
        self.predictors = tuple(predictors)

    def trunk(
        self, tokens_BS: Int32[Array, "b s"], context: ForwardContext, cache: Any = None
    ) -> TrunkOutput:
        found = super().trunk(tokens_BS, context, cache)
        return found._replace(aux=found.aux._replace(tallies=(found.aux.tallies,)))

    def ahead(
        self,
        depth: int,
        h_BSE: Float[Array, "b s embed"],
        tokens_BS: Int32[Array, "b s"],
        context: ForwardContext,
        cache: Any = None,
    ) -> TrunkOutput:
        """Returns the features of a depth; `logits` makes logits of token i + depth + 1 of them.

        Args:
          depth: at least 1.
          h_BSE: the features of the depth below, at position i.
          tokens_BS: token i + depth.
          context: of the decoder's own call, for positions i.
          cache: of the head; `predictors[depth - 1].empty_cache` makes an empty one.
        """
        head, key = self.predictors[depth - 1], context.key
        key = None if key is None else fold_in_name(key, f"depth {depth}")
        context = dataclasses.replace(context, key=key, observe=None)
        context = context.sharing({TOKENS: tokens_BS})
        with jax.named_scope("embed"):
            dtype, residual = context.compute.dtype, context.compute.residual
            e_BSE = embedded(dense(self.embedding), tokens_BS, dtype, residual)
            e_BSE *= jnp.asarray(self.embedding_scale, e_BSE.dtype)
        found = head(e_BSE, h_BSE, context, cache)
        last = eqx.tree_at(lambda m: m.norm, self, head.norm, is_leaf=lambda x: x is None)
        return found._replace(x_BSE=last.features(found.x_BSE, context))

    def with_heads(self, aux: AuxOutputs, of_heads: Sequence[AuxOutputs]) -> AuxOutputs:
        """Returns the reports of the decoder, with the heads that were computed.

        Losses and statistics are means over all layers. Each head has one layer.
        """
        depth, layers = self.stack.depth, self.stack.depth + len(of_heads)

        def mean(kind: str) -> dict[str, Array]:
            own, others = getattr(aux, kind), [getattr(each, kind) for each in of_heads]
            return {
                name: (depth * x + sum(each[name] for each in others)) / layers
                for name, x in own.items()
            }

        tallies = (*aux.tallies, *(each.tallies for each in of_heads))
        return AuxOutputs(mean("losses"), mean("statistics"), tallies)

    def updated(self, tallies: Any) -> "MultiTokenDecoder":
        model, of_heads = super().updated(tallies[0]), tallies[1:]
        heads = (head.updated(own) for head, own in zip(self.predictors, of_heads, strict=False))
        made = (*heads, *self.predictors[len(of_heads) :])
        return eqx.tree_at(lambda model: model.predictors, model, made)

    def measured(self, tallies: Any) -> dict[str, Array]:
        return super().measured(tallies[0])

    def weight_groups(self) -> tuple[WeightGroup, ...]:
        heads = (WeightGroup(f"head {i}", head) for i, head in enumerate(self.predictors, 1))
        return (*super().weight_groups(), *heads)


def without_heads(model: Any) -> Any:
    """Returns the decoder of a `MultiTokenDecoder`, and any other model as it is."""
    if not isinstance(model, MultiTokenDecoder):
        return model
    decoder = object.__new__(Decoder)
    for field in dataclasses.fields(Decoder):
        object.__setattr__(decoder, field.name, getattr(model, field.name))
    return decoder


def multi_token(
    of: Callable[..., Decoder],
    depths: int = 1,
    norm: Callable[..., Norm] = RMSNorm,
    like: Callable[..., Decoder] | None = None,
    *,
    key: PRNGKeyArray,
) -> Decoder:
    """Makes a decoder with `of(key=…)` and adds heads, for `Experiment.model`.

        model=fdl.Partial(multi_token, of=fdl.Partial(llama, …))

    Args:
      depths: number of heads, the number of tokens predicted after the next one; 0 for none.
      norm: makes the norms of embeddings and features, `norm(embed=…, key=…)`.
      like: a head's layer and last norm are the last ones of a decoder that this makes, with new
        weights; `None`: `of`.
    """
    if depths < 0:
        raise ValueError(f"depths must not be negative, got {depths}")
    if depths == 0:
        return of(key=key)

    def head(key: PRNGKeyArray, depth: int) -> Predictor:
        own = fold_in_name(key, f"depth {depth}")
        other = (like or of)(key=own)
        embed = other.embedding.shape[-1]
        last = jax.tree.map(lambda w_R: w_R[-1:], other.stack.patterns[-1][-1])
        stack = eqx.tree_at(lambda stack: stack.patterns, other.stack, ((last,),))
        norms = (norm(embed=embed, key=own) for _ in range(2))
        return Predictor(Combination(embed, *norms, key=own), stack, other.norm)

    def model(key: PRNGKeyArray) -> MultiTokenDecoder:
        decoder = of(key=key)
        if isinstance(decoder, MultiTokenDecoder):
            raise ValueError("`of` makes a model with heads already: leave out multi_token")
        return MultiTokenDecoder(decoder, [head(key, 1 + i) for i in range(depths)])

    return jit_init(model)(key)
