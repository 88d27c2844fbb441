"""What everything outside `lmlib.models` may ask of a model, and what it passes in.

A model is any Equinox module that has the parts of `Model`; `Decoder` is the one that lmlib's
families share, and docs/your-own-architecture.md writes another. Nothing else looks into a model's
fields.

Shapes: B batch, S sequence, E embed, V vocab.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray

from lmlib.compute import Compute
from lmlib.models.parts.rope import Rotary, Rotations


@dataclasses.dataclass(frozen=True)
class Context:
    """What differs from call to call, the same for all layers but for `key`.

    Args:
      positions_BS: of each token within its document, from 0.
      segment_ids_BS: which document of its row each token belongs to; attention stays within.
        `None`: a row is one document, and what follows it does not count.
      compute: how to compute.
      key: of what is random in this call (dropout); `None` for none of it.
      dropout: rate at which what blocks add to the residual stream is dropped, with a key.
      lengths_B: of each row's text so far, in calls that have a part of it beside a cache; `None`:
        documents are whole.
      counts_BS: which positions count in what layers report; `None`: all.
      order: which tokens of a row each device along `context` has: one of
        `lmlib.row_order.ORDERS`.
      wanted_BS: the tokens of which `Trunk.x_BSE` is wanted, at most one in each row; `None`: all.
      rotations: the rotary tables of these positions, by their settings; the stack makes them.
      observe: is called in each layer; what it returns comes back in `Trunk.observed`.
      tokens_BS: the tokens, for parts that look them up anew; the model sets them.
      first_BSE: the residual stream before the first layer, laid out as it; the stack sets it.
    """

    positions_BS: Int32[Array, "b s"]
    segment_ids_BS: Int32[Array, "b s"] | None
    compute: Compute
    key: PRNGKeyArray | None = None
    dropout: float = 0.0
    lengths_B: Int32[Array, "b"] | None = None
    counts_BS: Bool[Array, "b s"] | None = None
    order: str = "plain"
    wanted_BS: Bool[Array, "b s"] | None = None
    rotations: Mapping[Rotary, Rotations] = dataclasses.field(default_factory=dict)
    observe: "Observe | None" = None
    tokens_BS: Int32[Array, "b s"] | None = None
    first_BSE: Float[Array, "b s embed"] | None = None

    def total(self, x_BS: Float[Array, "b s ..."]) -> Float[Array, "..."]:
        """The float32 sum over the positions that count, for `Reports`."""
        if self.counts_BS is not None:
            counts_BS = jnp.reshape(self.counts_BS, (*x_BS.shape[:2], *(1,) * (x_BS.ndim - 2)))
            x_BS = jnp.where(counts_BS, x_BS, 0)
        return jnp.sum(x_BS, axis=(0, 1), dtype=jnp.float32)


def whole_rows(tokens_BS: Int32[Array, "b s"], compute: Compute) -> Context:
    """The context of rows that are one document each, from its first position on."""
    positions_BS = jnp.zeros_like(tokens_BS) + jnp.arange(tokens_BS.shape[1], dtype=jnp.int32)
    return Context(positions_BS, None, compute)


class LayerCall(NamedTuple):
    """A layer as it is computed.

    Attributes:
      layer: a `lmlib.models.layer.Layer`, its weights gathered in the compute dtype.
      before, after: the residual stream.
      context: of this call, with the rotary tables.
    """

    layer: Any
    before: Float[Array, "b s embed"]
    after: Float[Array, "b s embed"]
    context: Context


Observe = Callable[[LayerCall], Any]


class Names(NamedTuple):
    """Names that a part gives to what it computes, in the order of computing.

    Attributes:
      saved: activations that the backward pass may keep (`jax.ad_checkpoint.checkpoint_name`).
      scopes: of its operations (`jax.named_scope`), whose time and FLOPs are told apart.
    """

    saved: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()


def joined(*names: Names) -> Names:
    """All of them in their order, each once."""
    return Names(
        tuple(dict.fromkeys(name for each in names for name in each.saved)),
        tuple(dict.fromkeys(name for each in names for name in each.scopes)),
    )


class Reports(NamedTuple):
    """What layers say of their tokens besides the residual stream.

    Each value is a sum over the positions that count (`Context.counts_BS`) of something that
    depends on the position's own row alone. So sums over microbatches and over devices are those
    of the whole batch.

    Attributes:
      losses: what an objective may minimise, by name (`Objective.model_losses`); scalars. A
        router's balance for example.
      statistics: what is watched, by name; scalars, without gradient.
      tallies: what state without a gradient is updated from, in any tree
        (`lmlib.models.layer.Updating`).
    """

    losses: dict[str, Float[Array, ""]]
    statistics: dict[str, Float[Array, ""]]
    tallies: Any = None


NO_REPORTS = Reports({}, {})


class Trunk(NamedTuple):
    """What the layers make of tokens.

    Attributes:
      x_BSE: the residual stream after the last layer, in the compute dtype, laid out as
        `compute.residual` names; of each row's wanted token alone, or zeros, where the context says
        which and the model leaves out the others.
      reports: of all layers; losses and statistics are means over the layers that report them.
      cache: what a later call needs to go on after these tokens; `None` if none was given.
      observed: what `context.observe` returned, stacked in the order of the layers.
    """

    x_BSE: Float[Array, "b s embed"]
    reports: Reports = NO_REPORTS
    cache: Any = None
    observed: Any = None


class Part(NamedTuple):
    """A piece of a model in the order of the forward pass, for statistics and tables.

    Attributes:
      name: "embedding", "layers", "norm"; several parts may be called "layers".
      weights: the arrays, in any tree.
      layers: which layers these are, where arrays are stacked along a leading axis; else `None`.
    """

    name: str
    weights: Any
    layers: range | None = None


@runtime_checkable
class Model(Protocol):
    """A decoder of tokens. Its arrays are weights: each names its axes, declares its initial values
    (`lmlib.models.weights`), is float32, and lies as `lmlib.parallel.layout.stored` says."""

    @property
    def vocab(self) -> int:
        """How many token ids it has logits for."""

    @property
    def logit_cap(self) -> float | None:
        """c, where logits z become c · tanh(z / c); `None` where they stay."""

    def unembedding_EV(self) -> Float[Array, "embed vocab"]:
        """What makes logits of features, as it is stored; of a tied model the table's transpose."""

    def trunk(self, tokens_BS: Int32[Array, "b s"], context: Context, cache: Any = None) -> Trunk:
        """Embedding and layers."""

    def features(
        self, x_BSE: Float[Array, "b s embed"], context: Context
    ) -> Float[Array, "b s embed"]:
        """What `unembedding_EV` multiplies: the residual stream after the last norm, in the
        layout and the dtype of `x_BSE`."""

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Analytic FLOPs of forward and backward pass for one token, rematerialisation not counted
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). `causal` counts of attention only
        what the mask leaves; of experts only the active ones count."""

    @property
    def names(self) -> Names:
        """Of activations that can be kept, and of scopes, in the order of the forward pass."""

    def parts(self) -> tuple[Part, ...]:
        """All weights, each in one part, in the order of the forward pass."""

    def check(self, sequence_length: int, compute: Compute) -> None:
        """Raises ValueError if sequences so long cannot be computed as `compute` says."""


@runtime_checkable
class Cached(Model, Protocol):
    """A model that can go on from a cache. `lmlib.generate` computes with another one the whole
    sequence again for every token."""

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """What `trunk` takes as `cache` for the first tokens of `rows` sequences, which will have
        up to `length` tokens; `None` if it cannot. Every array in it and in the caches that follow
        has the rows along its second axis, after that of stacked layers.

        In each row the tokens of a call follow those of the calls before: positions go on, from 0.
        Tokens at negative positions, at a row's end, are padding: the cache keeps nothing of them.
        """


@runtime_checkable
class Switching(Cached, Protocol):
    """A model that computes long texts otherwise than short ones, from their first token on."""

    @property
    def switches(self) -> tuple[int, ...]:
        """Lengths in tokens. Of a text that grows beyond one of them a cache holds what no longer
        counts: all of it is computed again."""


_PURPOSES = {
    "vocab": "says how many token ids the model knows",
    "logit_cap": "says whether logits are capped; None if they are not",
    "unembedding_EV": "makes logits of features, in the loss",
    "trunk": "makes the residual stream of tokens, in every step",
    "features": "makes of the residual stream what the unembedding multiplies",
    "flops_per_token": "is what MFU and plan count",
    "names": "says which activations can be kept for the backward pass",
    "parts": "names the weights in statistics and tables",
    "check": "refuses what cannot be computed before anything compiles",
}


def check_protocol(model: Any) -> None:
    """Checks that `model` has every part of `Model`.

    Raises:
      ValueError: naming what is missing and what it is for.
    """
    missing = [
        f"{name}, which {what}" for name, what in _PURPOSES.items() if not hasattr(model, name)
    ]
    if missing:
        raise ValueError(
            f"{type(model).__name__} is no lmlib.models.protocol.Model: it lacks "
            f"{'; '.join(missing)}. docs/your-own-architecture.md shows a whole one"
        )
