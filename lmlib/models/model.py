"""The base class of models, which the rest of lmlib uses; nothing else looks into a model's fields.

Shapes: B batch, S sequence, E embed, V vocab.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from lmlib.compute import Compute
from lmlib.models.forward_context import ForwardContext, single_document_context
from lmlib.models.part import NO_AUX, AuxOutputs, Part, class_name
from lmlib.parallel.axes import Weight, map_weights
from lmlib.parallel.collectives import platform
from lmlib.parallel.layout import reshard
from lmlib.parallel.mesh import on_mesh_of

POSITION = "position"  # an axis with one entry for each position of a sequence


class TrunkOutput(NamedTuple):
    """The output of a model's layers."""

    x_BSE: Float[Array, "b s embed"]  # in the layout that `compute.residual` names
    aux: AuxOutputs = NO_AUX  # losses and statistics are means over the layers that report them
    cache: Any = None  # for the call with the tokens that follow
    observed: Any = None  # results of `context.observe`, stacked in the order of the layers


class WeightGroup(NamedTuple):
    """A tree of weights that tables show together."""

    name: str  # "embedding", "layers" (several groups), "norm"
    weights: Any
    layers: range | None = None  # the layers' indices, where arrays are stacked


class Model(Part):
    """A decoder of tokens. All its arrays are float32 weights, declared by `weights.weight`.

    `flops_per_token` must include the unembedding. In a model's caches the row is the second axis.
    """

    vocab: eqx.AbstractVar[int]  # number of token ids that have logits
    logit_cap: eqx.AbstractVar[float | None]  # c, if logits z become c · tanh(z / c)

    def __call__(
        self, tokens_BS: Int32[Array, "b s"], context: ForwardContext | None = None
    ) -> Float[Array, "b s vocab"]:
        """Returns the logits of the next token; by default each row is one document."""
        with on_mesh_of(self):
            tokens_BS = reshard(tokens_BS, "batch seq")
            context = context or single_document_context(tokens_BS, Compute(dtype=usual_dtype()))
            h_BSE = self.features(self.trunk(tokens_BS, context).x_BSE, context)
            return self.logits(reshard(h_BSE, "batch seq embed"), context.compute)

    def logits(
        self, features: Float[Array, "... embed"], compute: Compute
    ) -> Float[Array, "... vocab"]:
        """Returns the logits of the next token from `features`; see `logits_of`."""
        return logits_of(self.unembedding_EV(), self.logit_cap, features, compute)

    @abstractmethod
    def trunk(
        self, tokens_BS: Int32[Array, "b s"], context: ForwardContext, cache: Any = None
    ) -> TrunkOutput:
        """Runs the embedding and the layers."""

    @abstractmethod
    def features(
        self, x_BSE: Float[Array, "b s embed"], context: ForwardContext
    ) -> Float[Array, "b s embed"]:
        """The residual stream after the last norm, in the layout and dtype of `x_BSE`."""

    @abstractmethod
    def unembedding_EV(self) -> Float[Array, "embed vocab"]:
        """The matrix that maps features to logits, as stored; the transposed embedding if tied."""

    @abstractmethod
    def weight_groups(self) -> tuple[WeightGroup, ...]:
        """All weights, each in one group, in the order of the forward pass."""


def logits_of(
    table_EV: Float[Array, "embed vocab"],
    cap: float | None,
    features: Float[Array, "... embed"],
    compute: Compute,
) -> Float[Array, "... vocab"]:
    """Returns logits in float32 or wider, capped, with the vocabulary split over `tensor`."""
    table_EV = reshard(table_EV.astype(compute.dtype), "embed vocab")
    wide = jnp.promote_types(compute.dtype, jnp.float32)
    made = jnp.einsum("...e,ev->...v", features, table_EV, preferred_element_type=wide)
    return capped(made, cap)


def capped(logits: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """cap · tanh(logits / cap) (Gemma 2, arXiv:2408.00118, §2); `None` returns the logits."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def usual_dtype() -> str:
    """The fastest dtype for one token at a time: bfloat16, or float32 on CPUs, which convert."""
    return "float32" if platform() == "cpu" else "bfloat16"


def check_is_model(model: Any) -> None:
    """Raises ValueError if `model` is not a `Model`."""
    if not isinstance(model, Model):
        raise ValueError(
            f"{class_name(model)} is not a lmlib.models.model.Model: make it a subclass; "
            "docs/your-own-architecture.md shows one"
        )


def longest_sequence(model: Any) -> int | None:
    """The smallest size of an axis "position" among the weights; `None`: no limit."""
    return min(_positions(model).values(), default=None)


def check_positions(model: Any, sequence_length: int) -> None:
    """Raises ValueError if a weight has fewer positions: JAX would read its last one again."""
    for path, positions in _positions(model).items():
        if positions < sequence_length:
            raise ValueError(
                f"sequences of {sequence_length:,} tokens, but {path} has {positions:,} positions: "
                "make sequences shorter, or the model with more positions"
            )


def check_length(model: Any, sequence_length: int, compute: Compute) -> None:
    """Raises ValueError if `model` cannot compute sequences of this length with `compute`."""
    check_positions(model, sequence_length)
    model.check(sequence_length, compute)


def padded_length(model: Any, tokens: int, multiple: int) -> int:
    """Rounds `tokens` up to a `multiple`, at most to `longest_sequence`: few lengths compile."""
    padded = -(-tokens // multiple) * multiple
    return max(tokens, min(padded, longest_sequence(model) or padded))


def _positions(model: Any) -> dict[str, int]:
    """Sizes of the axis "position" of weights, by their paths."""
    found: dict[str, int] = {}

    def note(weight: Weight, x: Any) -> None:
        if POSITION in weight.axes:
            found[weight.path] = x.shape[weight.axes.index(POSITION)]

    map_weights(note, model)
    return found
