"""What a layer is, and what its parts are: protocols that the stack, caches and plan go by.

`lmlib.models.block` has the layers that lmlib's families are made of.

The methods of a layer and of its parts see the arrays of one layer, never those of a whole stack.

Shapes: B batch, S sequence, E embed.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lmlib.compute import Compute
from lmlib.models.parts.rope import Rotary
from lmlib.models.protocol import Context, Names, Reports
from lmlib.models.weights import product_flops

Norm = Callable[[Array], Array]


@runtime_checkable
class Layer(Protocol):
    """What the stack asks of a layer."""

    def __call__(
        self, x_BSE: Float[Array, "b s embed"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "b s embed"], Reports, Any]:
        """The residual stream after the layer, laid out as before it, what the layer reports, and
        the new cache."""

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Forward and backward, as `Model.flops_per_token` counts."""

    def check(self, sequence_length: int, compute: Compute) -> None:
        """Raises ValueError for what the layer cannot compute."""

    @property
    def names(self) -> Names:
        """Of its activations and scopes."""

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """Those whose tables it finds in `context.rotations`."""

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """What `Cached.empty_cache` says, for one layer, with the rows along the first axis; `None`
        if the layer cannot go on from a cache."""


@runtime_checkable
class AttendingLayer(Layer, Protocol):
    """A layer that takes weighted means of positions, and shows the weights."""

    def attention_weights(self, x_BSE: Array, context: Context) -> Array:
        """[b, heads, s, t]: how much each position (s) takes from each (t), for the residual stream
        before the layer.

        Raises:
          ValueError: if its mixer does not.
        """


@runtime_checkable
class Updating(Protocol):
    """A layer, or a part of one, with state that has no gradient (`weight(…, gradient=False)`)."""

    def updated(self, tallies: Any) -> Any:
        """Itself after a step whose whole batch gave `tallies`. Its weights with a gradient are
        `None` here; the others are laid out as in a call, in the dtype in which they rest."""


@runtime_checkable
class Measuring(Protocol):
    """A layer, or a part of one, whose tallies are worth watching."""

    def measured(self, tallies: Any) -> dict[str, Float[Array, ""]]:
        """Metrics of a step whose whole batch gave `tallies`, without gradient; of all layers that
        have one of them the log shows the mean. It sees no weights, which are `None` or stacked."""


@runtime_checkable
class Learning(Protocol):
    """A part of a layer whose weights may get no gradient from the loss."""

    @property
    def gradient_problem(self) -> str | None:
        """Why they get none, and what to change; `None`: they get one."""


class SimplePart(eqx.Module):
    """A mixer or an mlp but for its call, for those whose FLOPs are those of their weights and that
    refuse nothing. They name what they save and time in `names`."""

    names: ClassVar[Names] = Names()

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return product_flops(self)

    def check(self, sequence_length: int, compute: Compute) -> None:
        return


_OF_EACH = {
    "names": "names its activations and scopes, a lmlib.models.protocol.Names",
    "flops_per_token": "counts its FLOPs for MFU and plan",
    "check": "refuses what it cannot compute",
}


def check_part(
    part: Any, kind: str, arguments: Sequence[str], more: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Checks that `part` has what a layer or a plan asks of it.

    Args:
      kind: the protocol of this module that it implements.
      arguments: of its call.
      more: further attributes that it needs, and what each is for.

    Raises:
      ValueError: naming the part's class, what it lacks and the remedy.
    """
    name = f"{type(part).__module__}.{type(part).__qualname__}"
    wanted = {"__call__": "computes it", **_OF_EACH, **more}
    lacking = [f"{each}, which {what}" for each, what in wanted.items() if not hasattr(part, each)]
    if lacking:
        simple = "" if more else "; lmlib.models.layer.SimplePart has all but the call"
        raise ValueError(
            f"{name} is no lmlib.models.layer.{kind}: it lacks {'; '.join(lacking)}{simple}"
        )
    try:
        inspect.signature(part).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{name} is called with ({', '.join(arguments)}), which its `__call__` does not take: "
            f"{error}"
        ) from None
    names = part.names
    if not isinstance(names, Names) or str in map(type, names):
        raise ValueError(
            f"{name}.names must be a lmlib.models.protocol.Names of two tuples of names, such as "
            f"`Names(saved=('hidden',))`, got {names!r}"
        )


@runtime_checkable
class Mixer(Protocol):
    """What a block asks of its attention, or of what stands in its place. One with an attribute
    `rotary` finds that `Rotary`'s table in `context.rotations`."""

    def __call__(self, x_BSE: Array, context: Context, cache: Any = None) -> tuple[Array, Any]:
        """What is added to the residual stream, laid out as `context.compute.residual` names, and
        the new cache; x is whole along `seq`."""

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Forward and backward, its weights' included."""

    def check(self, sequence_length: int, compute: Compute) -> None:
        """Raises ValueError for what it cannot compute."""

    @property
    def names(self) -> Names:
        """Of its activations and scopes."""


@runtime_checkable
class CachedMixer(Mixer, Protocol):
    """A mixer that goes on from a cache."""

    def empty_cache(self, rows: int, length: int, dtype: DTypeLike) -> Any:
        """See `Layer.empty_cache`."""


@runtime_checkable
class WeightingMixer(Mixer, Protocol):
    """A mixer that takes weighted means of positions, and shows the weights."""

    def weights(self, x_BSE: Array, context: Context) -> Array:
        """See `AttendingLayer.attention_weights`, of the same x as a call."""


@runtime_checkable
class FeedForward(Protocol):
    """What a block asks of its mlp."""

    def __call__(self, x_BSE: Array, context: Context) -> tuple[Array, Reports]:
        """What is added to the residual stream, laid out as `context.compute.residual` names, and
        what is reported; x is whole along `seq`."""

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Forward and backward; of experts, only the active ones'."""

    def check(self, sequence_length: int, compute: Compute) -> None:
        """Raises ValueError for what it cannot compute."""

    @property
    def names(self) -> Names:
        """Of its activations and scopes."""
